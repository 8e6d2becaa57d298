/* Threads that compute a step together, and the barrier between its phases.
 *
 * The caller is thread 0; the others sleep between steps. Within a step phases are microseconds apart, so a thread that
 * waits first spins. If the one it waits for is not running - another process has its core - spinning would keep that
 * process from ending its turn, so after a while the thread gives its core away (OpenMP's default is to spin on, which
 * made steps ten times slower on a busy machine).
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "repertory.h"

enum { SPINS = 4000 }; /* some tens of microseconds */

struct Team {
    int64_t size;
    atomic_int arrived, phase;
    pthread_mutex_t lock;
    pthread_cond_t called;
    int64_t calls; /* steps begun; guarded by lock, like the two below */
    bool closing;
    void (*work)(void *argument, int64_t thread);
    void *argument;
    int64_t num_started;
    pthread_t threads[];
};

typedef struct {
    Team *team;
    int64_t thread;
} Member;

static inline void pause_spin(void)
{
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

void team_barrier(Team *team, int64_t thread)
{
    (void)thread;
    if (team->size == 1)
        return;
    int phase = atomic_load_explicit(&team->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) + 1 == team->size) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->phase, phase + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->phase, memory_order_acquire) == phase; spins++) {
        if (spins < SPINS)
            pause_spin();
        else
            sched_yield();
    }
}

static void *serve(void *argument)
{
    Member member = *(Member *)argument;
    free(argument);
    Team *team = member.team;
    for (int64_t seen = 0;; seen++) {
        pthread_mutex_lock(&team->lock);
        while (team->calls == seen && !team->closing)
            pthread_cond_wait(&team->called, &team->lock);
        bool closing = team->closing;
        pthread_mutex_unlock(&team->lock);
        if (closing)
            return NULL;
        team->work(team->argument, member.thread);
        team_barrier(team, member.thread);
    }
}

/* Runs `work` on all threads and returns when all have returned. */
void team_run(Team *team, void (*work)(void *argument, int64_t thread), void *argument)
{
    if (team->size > 1) {
        pthread_mutex_lock(&team->lock);
        team->work = work;
        team->argument = argument;
        team->calls++;
        pthread_cond_broadcast(&team->called);
        pthread_mutex_unlock(&team->lock);
    }
    work(argument, 0);
    team_barrier(team, 0);
}

/* NULL when there is no memory or no thread to be had. */
EXPORT Team *team_open(int64_t num_threads)
{
    Team *team = calloc(1, sizeof *team + num_threads * sizeof team->threads[0]);
    if (!team)
        return NULL;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->called, NULL);
    team->size = num_threads;
    for (int64_t thread = 1; thread < num_threads; thread++) {
        Member *member = malloc(sizeof *member);
        if (!member)
            break;
        *member = (Member){team, thread};
        if (pthread_create(&team->threads[team->num_started], NULL, serve, member) != 0) {
            free(member);
            break;
        }
        team->num_started++;
    }
    if (team->num_started == num_threads - 1)
        return team;
    team_close(team);
    return NULL;
}

/* Waits for the threads to end. Not while a step runs. */
EXPORT void team_close(Team *team)
{
    pthread_mutex_lock(&team->lock);
    team->closing = true;
    pthread_cond_broadcast(&team->called);
    pthread_mutex_unlock(&team->lock);
    for (int64_t i = 0; i < team->num_started; i++)
        pthread_join(team->threads[i], NULL);
    pthread_cond_destroy(&team->called);
    pthread_mutex_destroy(&team->lock);
    free(team);
}

int64_t team_size(const Team *team) { return team->size; }
