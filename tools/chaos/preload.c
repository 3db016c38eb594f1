/* Wrong wall clock and failing disk for one process, switched by a file that another process writes.

   Preloaded (LD_PRELOAD) into a role. CHAOS_CONTROL names a file of `struct control`, which is mapped, so that a change
   takes effect at once. CHAOS_DISK names the folder whose files fail.

   Clock: CLOCK_REALTIME is shifted; monotonic clocks are not. Waits with an absolute deadline on the shifted clock are
   shifted back, since the kernel's clock is not shifted: a wait keeps the duration that its caller computed.
   Disk: reads, writes and syncs of the folder's files fail with the error, `per_mille` of 1,000 of them; a negative
   error means short transfers of half of the bytes. `delay_us` delays each of them. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct control {
    int64_t clock_ns; /* added to the wall clock */
    int64_t error;    /* errno; -1: short transfers; 0: none */
    int64_t per_mille;
    int64_t delay_us;
    int64_t injected; /* number of failed transfers, counted here */
};

static struct control none;
static volatile struct control *control = &none;
static char folder[4096];
static size_t folder_length;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CHAOS_CONTROL"), *disk = getenv("CHAOS_DISK");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (mapped != MAP_FAILED) control = mapped;
        close(fd);
    }
    if (disk) {
        strncpy(folder, disk, sizeof folder - 1);
        folder_length = strlen(folder);
    }
}

/* dlsym could return the oldest version of the pthread functions, which has another layout. */
static void *next(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

#define NEXT(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))next(#name)

/* ---- clock ---- */

static struct timespec moved(struct timespec at, int64_t ns) {
    int64_t total = (int64_t)at.tv_sec * 1000000000 + at.tv_nsec + ns;
    if (total < 0) total = 0;
    at.tv_sec = total / 1000000000;
    at.tv_nsec = total % 1000000000;
    return at;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    NEXT(clock_gettime);
    int result = real(clock, at);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) *at = moved(*at, control->clock_ns);
    return result;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

int sem_timedwait(sem_t *sem, const struct timespec *until) {
    NEXT(sem_timedwait);
    struct timespec shifted = moved(*until, -control->clock_ns);
    return real(sem, &shifted);
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    NEXT(pthread_cond_timedwait);
    if (cond->__data.__wrefs & 2) return real(cond, mutex, until); /* glibc's mark of CLOCK_MONOTONIC */
    struct timespec shifted = moved(*until, -control->clock_ns);
    return real(cond, mutex, &shifted);
}

long syscall(long number, ...) {
    NEXT(syscall);
    va_list given;
    va_start(given, number);
    long a = va_arg(given, long), b = va_arg(given, long), c = va_arg(given, long);
    long d = va_arg(given, long), e = va_arg(given, long), f = va_arg(given, long);
    va_end(given);
    struct timespec shifted;
    if (number == SYS_futex && (b & FUTEX_CLOCK_REALTIME) && d) {
        shifted = moved(*(struct timespec *)d, -control->clock_ns);
        d = (long)&shifted;
    }
    return real(number, a, b, c, d, e, f);
}

/* ---- disk ---- */

static int is_on_disk(int fd) {
    char link[64], target[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, sizeof target);
    return length > (ssize_t)folder_length && !memcmp(target, folder, folder_length) && target[folder_length] == '/';
}

/* Returns 0, or the error to inject into this operation. */
static int64_t injected(int fd) {
    static uint32_t state = 12345;
    if ((!control->error && !control->delay_us) || !folder_length || !is_on_disk(fd)) return 0;
    if (control->delay_us) usleep((useconds_t)control->delay_us);
    if (!control->error) return 0;
    uint32_t drawn = __atomic_fetch_add(&state, 2654435761u, __ATOMIC_RELAXED);
    drawn = (drawn ^ drawn >> 15) * 2246822519u;
    if ((drawn >> 8) % 1000 >= (uint32_t)control->per_mille) return 0;
    __atomic_fetch_add((int64_t *)&control->injected, 1, __ATOMIC_RELAXED);
    return control->error;
}

#define TRANSFER(name, buffer_type, shorten) \
    ssize_t name(int fd, buffer_type data, size_t count, off64_t offset) { \
        NEXT(name); \
        int64_t error = injected(fd); \
        if (error > 0) { errno = (int)error; return -1; } \
        if (error < 0) count = shorten; \
        return real(fd, data, count, offset); \
    }

TRANSFER(pread64, void *, count / 2)
TRANSFER(pwrite64, const void *, count / 2)

#define VECTOR(name) \
    ssize_t name(int fd, const struct iovec *runs, int count, off64_t offset) { \
        NEXT(name); \
        int64_t error = injected(fd); \
        if (error > 0) { errno = (int)error; return -1; } \
        if (error < 0 && count > 1) count /= 2; \
        return real(fd, runs, count, offset); \
    }

VECTOR(preadv64)
VECTOR(pwritev64)

#define SYNC(name) \
    int name(int fd) { \
        NEXT(name); \
        int64_t error = injected(fd); \
        if (error > 0) { errno = (int)error; return -1; } \
        return real(fd); \
    }

SYNC(fsync)
SYNC(fdatasync)
