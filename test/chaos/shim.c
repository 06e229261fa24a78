// Loaded into train_gpt by test/chaos (LD_PRELOAD): what a disk and a clock may do to a program, at a chosen call.
//   CHAOS_OUT=DIR               calls count whose file is in DIR (the names of CALLS below; `any` is all but those that only look)
//   CHAOS_PART=TEXT             and whose path has TEXT in it
//   CHAOS_ONLY_RANK=R           on rank R alone
//   CHAOS_COUNT=FILE            at the end FILE.R holds how often each call was made
//   CHAOS_DIE="rename 3"        killed before the third rename, as kill -9 would
//   CHAOS_FAIL="fsync 5 28 2"   the fifth and sixth fsync fail with errno 28
//   CHAOS_LOSE="pwrite 3 2"     the third and fourth pwrite (or write) report success and write nothing
//   CHAOS_WRONG="pwrite 3"      the third pwrite (or write) writes one bit that is wrong; with a second number, several do
//   CHAOS_NOTHING=flock         every flock reports success and does nothing, as on some network file systems
//   CHAOS_SLOW="flock 200000"   every flock takes 200000 us longer
//   CHAOS_HOST=NAME             the host's name
//   CHAOS_CLOCK="0.2 -3600"     0.2 s after the start the time of day jumps by -3600 s; the monotonic clock goes on
// Everything else passes through.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define CALLS(X)                                                                                               \
    X(open) X(write) X(pwrite) X(ftruncate) X(fsync) X(rename) X(unlink) X(symlink) X(mkdir) X(flock) /* any */ \
    X(read) X(pread) X(stat) X(fdatasync)
enum {
#define X(name) call_##name,
    CALLS(X)
#undef X
    call_any,
    call_none
};
static const char* const names[] = {
#define X(name) #name,
    CALLS(X)
#undef X
    "any"};

static long made[call_any + 1];
static int die_call = call_none, fail_call = call_none, slow_call = call_none, lose_call = call_none, wrong_call = call_none,
           nothing_call = call_none, fail_errno, active;
static long die_at, fail_at, fail_times = 1, slow_us, lose_at, lose_times = 1, wrong_at, wrong_times = 1;
static double clock_after = -1, clock_shift, started;
static const char *out, *part;

// Words and numbers of a variable, between blanks or colons, which shells need not quote.
#define WORD "%31[a-z]"
#define GAP "%*[ :]"
static int call_named(const char* name) {
    for (int i = 0; i <= call_any; i++)
        if (!strcmp(name, names[i])) return i;
    return call_none;
}
static double monotonic(void) {
    struct timespec t;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static const char* my_rank(void) {
    const char* rank = getenv("OMPI_COMM_WORLD_RANK");
    return rank ? rank : "0";
}

__attribute__((constructor)) static void start(void) {
    const char *only = getenv("CHAOS_ONLY_RANK"), *die = getenv("CHAOS_DIE"), *fail = getenv("CHAOS_FAIL"),
               *slow = getenv("CHAOS_SLOW"), *jump = getenv("CHAOS_CLOCK"), *lose = getenv("CHAOS_LOSE"),
               *wrong = getenv("CHAOS_WRONG"), *nothing = getenv("CHAOS_NOTHING");
    char name[32];
    started = monotonic();
    out = getenv("CHAOS_OUT");
    part = getenv("CHAOS_PART");
    active = out && (!only || !strcmp(only, my_rank()));
    if (die && sscanf(die, WORD GAP "%ld", name, &die_at) == 2) die_call = call_named(name);
    if (fail && sscanf(fail, WORD GAP "%ld" GAP "%d" GAP "%ld", name, &fail_at, &fail_errno, &fail_times) >= 3) fail_call = call_named(name);
    if (slow && sscanf(slow, WORD GAP "%ld", name, &slow_us) == 2) slow_call = call_named(name);
    if (lose && sscanf(lose, WORD GAP "%ld" GAP "%ld", name, &lose_at, &lose_times) >= 2) lose_call = call_named(name);
    if (wrong && sscanf(wrong, WORD GAP "%ld" GAP "%ld", name, &wrong_at, &wrong_times) >= 2) wrong_call = call_named(name);
    if (nothing) nothing_call = call_named(nothing);
    if (active && jump) (void)!sscanf(jump, "%lf %lf", &clock_after, &clock_shift);
}
__attribute__((destructor)) static void finish(void) {
    char path[PATH_MAX];
    if (!getenv("CHAOS_COUNT")) return;
    snprintf(path, sizeof path, "%s.%s", getenv("CHAOS_COUNT"), my_rank());
    FILE* f = fopen(path, "w");
    for (int i = 0; f && i <= call_any; i++) fprintf(f, "%s %ld\n", names[i], made[i]);
    if (f) fclose(f);
}

static int counts(const char* path) {
    return active && !strncmp(path, out, strlen(out)) && (!part || strstr(path, part));
}
// Counts the call; what is to happen at it happens. Returns whether it is to fail.
static int fails(int call, const char* path) {
    if (!counts(path)) return 0;
    const int looks = call >= call_read;
    const long n = __sync_add_and_fetch(&made[call], 1), any = looks ? 0 : __sync_add_and_fetch(&made[call_any], 1);
    if ((die_call == call && n == die_at) || (die_call == call_any && any == die_at)) kill(getpid(), SIGKILL);
    if (slow_call == call || (slow_call == call_any && !looks)) usleep((useconds_t)slow_us);
    const long count = fail_call == call ? n : fail_call == call_any ? any : 0;
    if (!count || count < fail_at || count >= fail_at + fail_times) return 0;
    errno = fail_errno;
    return 1;
}
static const char* path_of(int fd, char path[PATH_MAX]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, PATH_MAX - 1);
    path[n > 0 ? n : 0] = 0;
    return path;
}
static int fails_fd(int call, int fd) {
    char path[PATH_MAX];
    return active && fails(call, path_of(fd, path));
}
// Of a write that has been counted: whether it is one of those that `which` names.
static int is_one(int which, long at, long times, int call, int fd) {
    char path[PATH_MAX];
    const long n = made[call];
    return which == call && n >= at && n < at + times && counts(path_of(fd, path));
}
// The data with a bit that is wrong, in new memory.
static void* with_wrong_bit(const void* data, size_t n) {
    char* copy = malloc(n);
    memcpy(copy, data, n);
    copy[n / 2] ^= 4;
    return copy;
}

#define NEXT(type, name, ...)                                     \
    static type (*next)(__VA_ARGS__);                             \
    if (!next) next = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define OPEN(name)                                                          \
    int name(const char* path, int flags, ...) {                            \
        NEXT(int, #name, const char*, int, ...);                            \
        va_list arguments;                                                  \
        va_start(arguments, flags);                                         \
        const mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0; \
        va_end(arguments);                                                  \
        return fails(call_open, path) ? -1 : next(path, flags, mode);       \
    }
OPEN(open)
OPEN(open64)
ssize_t write(int fd, const void* data, size_t n) {
    NEXT(ssize_t, "write", int, const void*, size_t);
    if (fails_fd(call_write, fd)) return -1;
    if (is_one(lose_call, lose_at, lose_times, call_write, fd)) {  // what is there stays, or is a hole
        lseek(fd, (off_t)n, SEEK_CUR);
        return (ssize_t)n;
    }
    if (!n || !is_one(wrong_call, wrong_at, wrong_times, call_write, fd)) return next(fd, data, n);
    void* wrong = with_wrong_bit(data, n);
    const ssize_t done = next(fd, wrong, n);
    free(wrong);
    return done;
}
ssize_t pwrite(int fd, const void* data, size_t n, off_t at) {
    NEXT(ssize_t, "pwrite", int, const void*, size_t, off_t);
    if (fails_fd(call_pwrite, fd)) return -1;
    if (is_one(lose_call, lose_at, lose_times, call_pwrite, fd)) return (ssize_t)n;
    if (!n || !is_one(wrong_call, wrong_at, wrong_times, call_pwrite, fd)) return next(fd, data, n, at);
    void* wrong = with_wrong_bit(data, n);
    const ssize_t done = next(fd, wrong, n, at);
    free(wrong);
    return done;
}
ssize_t read(int fd, void* data, size_t n) {
    NEXT(ssize_t, "read", int, void*, size_t);
    return fails_fd(call_read, fd) ? -1 : next(fd, data, n);
}
ssize_t pread(int fd, void* data, size_t n, off_t at) {
    NEXT(ssize_t, "pread", int, void*, size_t, off_t);
    return fails_fd(call_pread, fd) ? -1 : next(fd, data, n, at);
}
ssize_t pread64(int fd, void* data, size_t n, off_t at) { return pread(fd, data, n, at); }
int stat(const char* path, struct stat* s) {
    NEXT(int, "stat", const char*, struct stat*);
    return fails(call_stat, path) ? -1 : next(path, s);
}
ssize_t pwrite64(int fd, const void* data, size_t n, off_t at) { return pwrite(fd, data, n, at); }
int ftruncate(int fd, off_t size) {
    NEXT(int, "ftruncate", int, off_t);
    return fails_fd(call_ftruncate, fd) ? -1 : next(fd, size);
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int fsync(int fd) {
    NEXT(int, "fsync", int);
    return fails_fd(call_fsync, fd) ? -1 : next(fd);
}
int fdatasync(int fd) {
    NEXT(int, "fdatasync", int);
    return fails_fd(call_fdatasync, fd) ? -1 : next(fd);
}
int flock(int fd, int how) {
    NEXT(int, "flock", int, int);
    char path[PATH_MAX];
    if (fails_fd(call_flock, fd)) return -1;
    return nothing_call == call_flock && counts(path_of(fd, path)) ? 0 : next(fd, how);
}
int rename(const char* from, const char* to) {
    NEXT(int, "rename", const char*, const char*);
    return fails(call_rename, to) ? -1 : next(from, to);
}
int unlink(const char* path) {
    NEXT(int, "unlink", const char*);
    return fails(call_unlink, path) ? -1 : next(path);
}
int symlink(const char* target, const char* path) {
    NEXT(int, "symlink", const char*, const char*);
    return fails(call_symlink, path) ? -1 : next(target, path);
}
int mkdir(const char* path, mode_t mode) {
    NEXT(int, "mkdir", const char*, mode_t);
    return fails(call_mkdir, path) ? -1 : next(path, mode);
}

int gethostname(char* name, size_t size) {
    NEXT(int, "gethostname", char*, size_t);
    if (!getenv("CHAOS_HOST")) return next(name, size);
    snprintf(name, size, "%s", getenv("CHAOS_HOST"));
    return 0;
}

static double jumped(void) { return clock_after >= 0 && monotonic() - started >= clock_after ? clock_shift : 0; }
int clock_gettime(clockid_t which, struct timespec* t) {
    const int result = (int)syscall(SYS_clock_gettime, which, t);
    if (which == CLOCK_REALTIME && result == 0) t->tv_sec += (time_t)jumped();
    return result;
}
int gettimeofday(struct timeval* restrict t, void* restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    t->tv_sec = now.tv_sec, t->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t* t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) *t = now.tv_sec;
    return now.tv_sec;
}
