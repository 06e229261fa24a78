// Commands that this program starts.
#pragma once
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "check.h"
#include "text.h"

// Starts a command, found in PATH, in a process of its own, and returns that process. The process first calls `prepare`; it
// gets the signal `at_our_end` when this program ends, for whatever reason. Its exit status is 127 if there is no such command.
template <class F>
pid_t start_process(const Strings& words, int at_our_end, F prepare) {
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    const pid_t parent = getpid(), child = fork();
    if (child < 0) fail("cannot start a process: %s", strerror(errno));
    if (child > 0) return child;
    prepare();
    prctl(PR_SET_PDEATHSIG, at_our_end);
    if (getppid() != parent) _exit(127);
    execvp(arguments[0], arguments.data());
    dprintf(STDERR_FILENO, "error: cannot run %s: %s\n", arguments[0], strerror(errno));
    _exit(127);
}

// The exit status of a process that waitpid() found ended, or 128 plus the signal that ended it, as in a shell.
inline int exit_status(int waited) { return WIFEXITED(waited) ? WEXITSTATUS(waited) : 128 + WTERMSIG(waited); }

// Replaces a standard stream of this process by a file.
inline void redirect(int stream, const char* path, int flags) {
    const int file = open(path, flags | O_CLOEXEC, 0644);
    if (file >= 0) dup2(file, stream);
}
