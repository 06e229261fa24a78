// Commands that this program starts.
#pragma once
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
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

// True if start_process() would find this command: a path, or a name in a folder of PATH.
inline bool is_program(const std::string& name) {
    if (name.find('/') != std::string::npos) return access(name.c_str(), X_OK) == 0;
    const char* path = getenv("PATH");
    for (std::string_view rest = path ? path : "/usr/bin:/bin"; !rest.empty();) {
        const size_t end = std::min(rest.size(), rest.find(':'));
        if (access((std::string(rest.substr(0, end)) + "/" + name).c_str(), X_OK) == 0) return true;
        rest.remove_prefix(std::min(rest.size(), end + 1));
    }
    return false;
}

// The exit status of a process that waitpid() found ended, or 128 plus the signal that ended it, as in a shell.
inline int exit_status(int waited) { return WIFEXITED(waited) ? WEXITSTATUS(waited) : 128 + WTERMSIG(waited); }

// Replaces a standard stream of this process by a file.
inline void redirect(int stream, const char* path, int flags) {
    const int file = open(path, flags | O_CLOEXEC, 0644);
    if (file >= 0) dup2(file, stream);
}
