/*
 * A wall clock that is ahead by the seconds in the file $LYING_CLOCK, which may change at any time. For a PostgreSQL
 * server, by LD_PRELOAD. libfaketime opens that file by fopen, which allocates memory; a server asks for the time in its
 * signal handlers too (timeouts, deadlock checks), where an allocation breaks the heap. Here are system calls alone.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static char path[4096];

/* A copy: a server writes its process title where its environment was. */
__attribute__((constructor)) static void know_the_path(void) {
  const char *given = getenv("LYING_CLOCK");
  if (given) strncpy(path, given, sizeof path - 1);
}

static long ahead(void) {
  char text[32];
  long file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  long length = syscall(SYS_read, file, text, sizeof text - 1), seconds = 0, sign = 1;
  syscall(SYS_close, file);
  for (long i = 0; i < length; i++) {
    if (text[i] == '-') sign = -1;
    if (text[i] >= '0' && text[i] <= '9') seconds = seconds * 10 + text[i] - '0';
  }
  return sign * seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *kept) {
  struct timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  if (kept) *kept = now.tv_sec;
  return now.tv_sec;
}
