/* Pins each thread of a team to a core. Otherwise the operating system may wake a thread on the core of the one that waits
 * for it, and leave both there: products then take longer with two threads than with one.
 */

#define _GNU_SOURCE

#if defined(__linux__)
#include <sched.h>
#endif

#include "cpu_team.h"

typedef struct {
    const int64_t *cores; /* [count]: one for each thread */
    long count;
} places_work;

#if defined(__linux__)

static void stay_on(long core)
{
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    sched_setaffinity(0, sizeof only, &only);
}

/* The calling thread keeps its current core if that is one of `cores`: place 0 is the place of that core. */
typedef struct {
    places_work told;
    long kept;
} kept_places;

static void place_part(const void *shared, long part, long parts)
{
    const kept_places *w = shared;
    (void)parts;
    stay_on(w->told.cores[(part + w->kept) % w->told.count]);
}

void keepsight_place_team(const places_work *told)
{
    kept_places work = {*told, 0};
    const int core = sched_getcpu();
    for (long i = 0; i < told->count; i++)
        if (told->cores[i] == core)
            work.kept = i;
    share(place_part, &work, told->count);
}

#else

void keepsight_place_team(const places_work *told)
{
    (void)told;
}

#endif
