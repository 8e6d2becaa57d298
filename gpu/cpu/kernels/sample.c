/* Sampling of many rows: shared out among threads, a row at a time. */
#include <stdatomic.h>

#include "sampling.h"

typedef struct {
    const Sampling *sampling;
    Sampler *sampler;
    atomic_long next;
} Work;

static int64_t padded(int64_t vocab) { return (vocab + SUMMED - 1) / SUMMED * SUMMED + SUMMED; }

/* Floats of scratch for a thread. */
EXPORT int64_t sample_floats(int64_t vocab) { return 2 * padded(vocab) + 2 * (padded(vocab) / SUMMED); }

static void work(void *argument, int64_t thread)
{
    Work *w = argument;
    const Sampling *s = w->sampling;
    float *scratch = s->scratch + thread * sample_floats(s->vocab);
    const int64_t width = padded(s->vocab);
    const Workspace space = {scratch, scratch + width, (double *)(scratch + 2 * width)};
    for (;;) {
        const int64_t row = atomic_fetch_add(&w->next, 1);
        if (row >= s->num_draws)
            return;
        s->outcomes[row] = w->sampler(&s->draws[row], s->logits + row * s->stride, s->vocab, space, &s->tokens[row]);
    }
}

/* Draws a token for each row. */
EXPORT void run_sample(int64_t level, const Sampling *sampling, Team *team)
{
#ifdef __x86_64__
    static Sampler *const samplers[NUM_LEVELS] = {sample_base, sample_avx2, sample_avx512, sample_avx512};
#else
    static Sampler *const samplers[NUM_LEVELS] = {sample_base, sample_base, sample_base, sample_base};
#endif
    Work w = {sampling, samplers[level], 0};
    team_run(team, work, &w);
}
