// Fibers: stacks that one OS thread switches between. The emulator runs every CUDA thread of a block on one.
//   Fiber::create(entry)   a fiber that starts in entry() at the first switch to it; entry must not return
//   switch_fiber(from, to) saves the running fiber in `from`, resumes `to`
// The sanitizers are notified of each switch. Under ThreadSanitizer each fiber counts as a thread, and a switch by itself
// orders nothing: only the kernel's synchronization does, so a data race in a kernel is reported with both of its lines.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define EMU_TSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#elif __has_feature(thread_sanitizer)
#define EMU_TSAN 1
#endif
#endif

#ifdef EMU_ASAN
extern "C" void __sanitizer_start_switch_fiber(void**, const void*, size_t);
extern "C" void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
extern "C" void __asan_poison_memory_region(void const volatile*, size_t);
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t);
#endif
#ifdef EMU_TSAN
extern "C" void* __tsan_create_fiber(unsigned);
extern "C" void __tsan_switch_to_fiber(void*, unsigned);
extern "C" void* __tsan_get_current_fiber();
extern "C" void __tsan_destroy_fiber(void*);
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
extern "C" void AnnotateIgnoreReadsBegin(const char*, int);
extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
#endif

namespace emu {

// Annotations for ThreadSanitizer: release(x) before, acquire(x) after: everything before the one happens before everything
// after the other. Quiet: excludes the emulator's own accesses.
#ifdef EMU_TSAN
inline void release(void* x) { __tsan_release(x); }
inline void acquire(void* x) { __tsan_acquire(x); }
inline void quiet_begin() {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
}
inline void quiet_end() {
    AnnotateIgnoreReadsEnd("", 0);
    AnnotateIgnoreWritesEnd("", 0);
}
#define EMU_NO_TSAN __attribute__((no_sanitize("thread")))
#else
inline void release(void*) {}
inline void acquire(void*) {}
inline void quiet_begin() {}
inline void quiet_end() {}
#define EMU_NO_TSAN
#endif
// For frequent work of the emulator itself, switches between threads and products: its programs are compiled with -Og. Such
// functions are only inlined in each other.
#if defined(__GNUC__) && !defined(__clang__)
#define EMU_OPTIMIZED __attribute__((optimize("O3")))
#else
#define EMU_OPTIMIZED
#endif
struct Quiet {
    Quiet() { quiet_begin(); }
    ~Quiet() { quiet_end(); }
};

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;  // null: the OS thread's own
    void* owner = nullptr;  // the owner of its code
#ifdef EMU_ASAN
    void* fake_stack = nullptr;
    const void* bottom = nullptr;
    size_t size = 0;
#endif
#ifdef EMU_TSAN
    void* tsan = nullptr;
#endif

#if defined(EMU_ASAN) || defined(EMU_TSAN)
    static constexpr size_t stack_bytes = 256 << 10;
#else
    static constexpr size_t stack_bytes = 128 << 10;
#endif

    static Fiber* create(void (*entry)());
    static void destroy(Fiber* f) {
#ifdef EMU_TSAN
        if (f->tsan) __tsan_destroy_fiber(f->tsan);
#endif
        munmap(f->stack, stack_bytes);
        delete f;
    }
};

extern "C" void emu_switch_stack(void** save, void* to);

// Callee-saved registers are pushed on the old stack and popped from the new one; the compiler saves the others.
#if defined(__x86_64__)
asm(R"(
.text
.weak emu_switch_stack
.type emu_switch_stack,@function
emu_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp,(%rdi)
    movq %rsi,%rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch_stack,.-emu_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(
.text
.weak emu_switch_stack
emu_switch_stack:
    sub sp,sp,#160
    stp x19,x20,[sp]
    stp x21,x22,[sp,#16]
    stp x23,x24,[sp,#32]
    stp x25,x26,[sp,#48]
    stp x27,x28,[sp,#64]
    stp x29,x30,[sp,#80]
    stp d8,d9,[sp,#96]
    stp d10,d11,[sp,#112]
    stp d12,d13,[sp,#128]
    stp d14,d15,[sp,#144]
    mov x2,sp
    str x2,[x0]
    mov sp,x1
    ldp x19,x20,[sp]
    ldp x21,x22,[sp,#16]
    ldp x23,x24,[sp,#32]
    ldp x25,x26,[sp,#48]
    ldp x27,x28,[sp,#64]
    ldp x29,x30,[sp,#80]
    ldp d8,d9,[sp,#96]
    ldp d10,d11,[sp,#112]
    ldp d12,d13,[sp,#128]
    ldp d14,d15,[sp,#144]
    add sp,sp,#160
    ret
)");
#else
#error "the emulator's stack switch is written for x86-64 and aarch64"
#endif

inline Fiber* Fiber::create(void (*entry)()) {
    Fiber* f = new Fiber;
    f->stack = (char*)mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (f->stack == MAP_FAILED) {
        perror("emu: mmap of a fiber's stack");
        abort();
    }
    mprotect(f->stack, 4096, PROT_NONE);  // running off the stack ends the program instead of overwriting its neighbor
    // Stacks start at different offsets, or they would share a few sets of the caches.
    static unsigned created = 0;
    void** top = (void**)(f->stack + stack_bytes - 64 - created++ % 32 * 1088);
#if defined(__x86_64__)
    *--top = nullptr;  // keeps the stack aligned as after a call
    *--top = (void*)entry;
    top -= 6;
    memset(top, 0, 6 * sizeof *top);
#else
    top -= 20;
    memset(top, 0, 20 * sizeof *top);
    top[11] = (void*)entry;  // x30, the return address
#endif
    f->stack_pointer = top;
#ifdef EMU_ASAN
    f->bottom = f->stack;
    f->size = stack_bytes;
#endif
#ifdef EMU_TSAN
    f->tsan = __tsan_create_fiber(0);
#endif
    return f;
}

EMU_OPTIMIZED EMU_NO_TSAN __attribute__((noinline)) inline void switch_fiber(Fiber* from, Fiber* to) {
#ifdef EMU_TSAN
    constexpr unsigned orders_nothing = 1;
    __tsan_switch_to_fiber(to->tsan, orders_nothing);
#endif
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(&from->fake_stack, to->bottom, to->size);
#endif
    emu_switch_stack(&from->stack_pointer, to->stack_pointer);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

// The first code that runs on a new fiber; reports the bounds of `from`'s stack, which only the sanitizer knows.
inline void entered_fiber(Fiber* from) {
#ifdef EMU_ASAN
    const void* bottom;
    size_t size;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
    if (!from->bottom) {
        from->bottom = bottom;
        from->size = size;
    }
#else
    (void)from;
#endif
}

}  // namespace emu
