/* Threads for computation on a CPU: torch's own team, as two teams on the same cores would wait for each other. */

#ifndef KEEPSIGHT_CPU_TEAM_H
#define KEEPSIGHT_CPU_TEAM_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define INLINE static inline __attribute__((always_inline))

/* From libgomp, which is loaded with torch. */
extern void GOMP_parallel(void (*run)(void *), void *job, unsigned num_threads, unsigned flags);
extern int omp_get_max_threads(void);
extern int omp_get_num_threads(void);
extern int omp_get_thread_num(void);

typedef struct {
    void (*run)(const void *work, long part, long parts);
    const void *work;
} job;

/* Uses the actual number of threads: the team may be smaller than requested. */
static void run_part(void *shared)
{
    const job *all = shared;
    all->run(all->work, omp_get_thread_num(), omp_get_num_threads());
}

static inline void share(void (*run)(const void *, long, long), const void *work, long most_parts)
{
    const long most_threads = omp_get_max_threads(), threads = most_parts < most_threads ? most_parts : most_threads;
    job all = {run, work};
    if (threads <= 1)
        run(work, 0, 1);
    else
        GOMP_parallel(run_part, &all, threads, 0);
}

INLINE long lesser(long a, long b)
{
    return a < b ? a : b;
}

INLINE long parts_of(long count, long most)
{
    return (count + most - 1) / most;
}

/* How often memory was refused; cpu_library.py then raises an error, as results are missing. */
extern atomic_long keepsight_refusals;

/* Allocate memory aligned to a cache line, to be freed by the caller; null if there is none. */
static inline void *room_for(long bytes)
{
    void *room = aligned_alloc(64, bytes > 0 ? parts_of(bytes, 64) * 64 : 64);
    if (!room)
        atomic_fetch_add(&keepsight_refusals, 1);
    return room;
}

/* Fewer numbers are finished before a second thread has started. */
#define NUMBERS_WORTH_A_TEAM 32768

static inline long parts_for(long numbers)
{
    return numbers < NUMBERS_WORTH_A_TEAM ? 1 : INT32_MAX;
}

#endif
