/* The draw of one token, in vectors of one instruction set. sample_*.c includes it after its vec_*.h.
 *
 * ../../sampling.py is the reference; the order of the steps and what they mean stands there. Weights are exp of
 * (logit - maximum) / temperature, so the largest is 1 and none is above it.
 *
 * Nothing is sorted. What top-k and top-p keep is all weights above a threshold and some of those equal to it. Positive floats
 * are ordered as their bits are, so the threshold is found by halving an interval of bits in which it must lie: one pass
 * counts (or adds up) the weights above the middle. Weights outside the interval are settled and are thrown out as soon as
 * they are a quarter of the rest, so that all passes together cost a few over the whole vocabulary.
 */
#include <math.h>
#include <string.h>

#include "sampling.h"
#include "largest.h"

#define NEVER 0x1p-123f /* weights below it are none: no float64 sum would notice them */

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The next float below a positive one: x > before(y) is x >= y. */
static inline float before(float x) { return of_bits(bits_of(x) - 1); }

/* e^a for a <= 0, to the last bit or two; 0 where it is below NEVER, or a is NaN. The series of e^rest, |rest| <= ln 2 / 2. */
static inline vf exp_of(vf a)
{
    const vf round = vf_set1(0x1.8p23f); /* added and taken away, it leaves a whole number */
    a = vf_max(a, vf_set1(-87.f));
    const vf whole = vf_sub(vf_fma(a, vf_set1(0x1.715476p0f), round), round);
    const vf rest = vf_fma(whole, vf_set1(-0x1.7f7d1cp-20f), vf_fma(whole, vf_set1(-0x1.62e4p-1f), a)); /* ln 2 in two parts */
    vf p = vf_set1(1 / 5040.f);
    p = vf_fma(p, rest, vf_set1(1 / 720.f));
    p = vf_fma(p, rest, vf_set1(1 / 120.f));
    p = vf_fma(p, rest, vf_set1(1 / 24.f));
    p = vf_fma(p, rest, vf_set1(1 / 6.f));
    p = vf_fma(p, rest, vf_set1(.5f));
    p = vf_fma(p, rest, vf_set1(1.f));
    p = vf_fma(p, rest, vf_set1(1.f));
    return vf_above(vf_scale(p, whole), NEVER);
}

static void mask(float *logits, int64_t vocab, const int32_t *words, int64_t num_words)
{
    for (int64_t word = 0; word * 32 < vocab; word++) {
        const uint32_t allowed = word < num_words ? (uint32_t)words[word] : 0;
        const int64_t first = word * 32, last = first + 32 < vocab ? first + 32 : vocab;
        if (allowed == UINT32_MAX)
            continue;
        for (int64_t i = first; i < last; i++)
            logits[i] = allowed >> (i - first) & 1 ? logits[i] : -INFINITY;
    }
}

static void edit(const Draw *d, float *logits, int64_t vocab)
{
    for (int i = 0; i < NUM_MASKS; i++)
        if (d->masks[i])
            mask(logits, vocab, d->masks[i], d->num_words[i]);
    for (int64_t i = 0; i < d->num_barred; i++)
        logits[d->barred[i]] = -INFINITY;
    for (int64_t i = 0; i < d->num_bias; i++)
        logits[d->bias_ids[i]] += d->bias[i];
    /* Two loops: in one, the compiler could round the product and the difference as one. */
    for (int64_t i = 0; i < d->num_seen; i++) {
        float *logit = &logits[d->seen[i]];
        *logit = *logit > 0 ? *logit / d->repetition : *logit * d->repetition;
    }
    for (int64_t i = 0; i < d->num_seen; i++)
        logits[d->seen[i]] -= d->penalties[i];
}

static bool is_edited(const Draw *d) { return d->masks[0] || d->masks[1] || d->num_barred || d->num_bias || d->num_seen; }

/* The first place of `value`, which is there. */
static int32_t place_of(const float *values, int64_t count, float value)
{
    enum { STRIDE = 8 * LANES };
    int64_t i = 0;
    for (; i + STRIDE <= count; i += STRIDE) {
        vf largest = vf_load_f32(values + i);
        for (int j = LANES; j < STRIDE; j += LANES)
            largest = vf_max(largest, vf_load_f32(values + i + j));
        if (vf_largest(largest) >= value)
            break;
    }
    while (values[i] != value)
        i++;
    return (int32_t)i;
}

typedef struct {
    int64_t count;
    double mass;
} Share;

typedef struct {
    float maximum, temperature, inverse, least; /* weights up to `least` are none */
} Scale;

/* The quotient is corrected by what it leaves over, which gives the float that a division gives, in a fifth of the time
 * (Markstein 1990). Where that is no number the weight is none. */
static inline vf weight_of(vf logits, Scale scale)
{
    const vf a = vf_sub(logits, vf_set1(scale.maximum)), quotient = vf_mul(a, vf_set1(scale.inverse));
    const vf left = vf_fma(quotient, vf_set1(-scale.temperature), a);
    return vf_above(exp_of(vf_fma(left, vf_set1(scale.inverse), quotient)), scale.least);
}

/* Weights of `vocab` logits, those below min-p 0, and 0 behind them up to a whole number of SUMMED. In place or not.
 * `sums` get the sum of each SUMMED weights. Returns the number and sum of all. */
static Share weigh(const Draw *d, const float *logits, int64_t vocab, float maximum, Workspace space)
{
    const float temperature = d->temperature < 1e30f ? d->temperature : 1e30f; /* has an inverse, and all weights are 1 */
    const Scale scale = {maximum, temperature, 1 / temperature, d->min_p > 0 ? before(d->min_p) : 0};
    Share all = {0, 0};
    for (int64_t first = 0; first < vocab; first += SUMMED) {
        vd sum = vd_zero();
        for (int64_t i = first; i < first + SUMMED; i += LANES) {
            vf weight = vf_set1(0);
            if (i + LANES <= vocab)
                weight = weight_of(vf_load_f32(logits + i), scale);
            else if (i < vocab) {
                float tail[LANES];
                for (int lane = 0; lane < LANES; lane++)
                    tail[lane] = i + lane < vocab ? logits[i + lane] : -INFINITY;
                weight = weight_of(vf_load_f32(tail), scale);
            }
            vf_store_f32(space.weights + i, weight);
            all.count += vf_num_above(weight, 0);
            sum = vd_add(sum, weight);
        }
        all.mass += space.sums[first / SUMMED] = vd_sum(sum);
    }
    return all;
}

/* How many of `values` are above `key`, and with `has_mass` their sum, else 0. `values` are readable, and 0, up to a whole
 * vector. */
static inline Share above(const float *values, int64_t count, float key, bool has_mass)
{
    vd mass = vd_zero();
    int64_t number = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        const vf a = vf_load_f32(values + i);
        number += vf_num_above(a, key);
        if (has_mass)
            mass = vd_add(mass, vf_above(a, key));
    }
    return (Share){number, vd_sum(mass)};
}

/* Those of `values` in (low, high], to `to`, which may be `values`, and 0 behind them. Returns their number. */
static int64_t between(const float *values, int64_t count, float low, float high, float *to)
{
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += LANES)
        found += vf_pack(to + found, vf_load_f32(values + i), low, high);
    vf_store_f32(to + found, vf_set1(0));
    return found;
}

/* What a filter keeps: the weights above `least`, and the first `num_least` of those that are equal to it. */
typedef struct {
    float least;
    int64_t num_least;
} Kept;

/* The fewest largest of `values`, all of which (`total`) are enough, that are `wanted` in number, or without a number (0) add
 * up to `goal`. `room` is as large as `values`, and may be them. */
static inline Kept keep(const float *values, int64_t count, Share total, int64_t wanted, double goal, float *room)
{
    enum { STEP = 12 << 23 }; /* weights that matter are 2^-12 or more of the largest, until they are found not to be */
    uint32_t low = 0, high = bits_of(1); /* what is above `low` is enough, what is above `high` is not */
    Share above_low = total, above_high = {0, 0}, outside = {0, 0}; /* `outside`: those thrown out that are above `high` */
    while (high - low > 1) {
        const uint32_t middle = low || high <= STEP ? low + (high - low) / 2 : high - STEP;
        Share share = above(values, count, of_bits(middle), !wanted);
        share.count += outside.count;
        share.mass += outside.mass;
        if (wanted ? share.count >= wanted : share.mass >= goal) {
            low = middle;
            above_low = share;
        } else {
            high = middle;
            above_high = share;
        }
        if (4 * (above_low.count - above_high.count) > 3 * count)
            continue;
        count = between(values, count, of_bits(low), of_bits(high), room);
        values = room;
        outside = above_high;
    }
    Kept kept = {of_bits(high), 0};
    const int64_t equal = above_low.count - above_high.count;
    if (wanted)
        kept.num_least = wanted - above_high.count;
    for (double mass = above_high.mass; !wanted && mass < goal && kept.num_least < equal; mass += kept.least)
        kept.num_least++;
    return kept;
}

/* What top-k and top-p keep of the weights, which are `all`. */
static Kept filter(const Draw *d, int64_t vocab, Share all, Workspace space)
{
    const float *values = space.weights;
    int64_t count = vocab;
    Kept kept = {0, 0};
    if (all.count > d->top_k)
        kept = keep(values, count, all, d->top_k, 0, space.candidates);
    if (d->top_p >= 1)
        return kept;
    if (kept.least > 0) {
        count = between(values, count, kept.least, 1, space.candidates);
        for (int64_t i = 0; i < kept.num_least; i++)
            space.candidates[count++] = kept.least;
        vf_store_f32(space.candidates + count, vf_set1(0));
        values = space.candidates;
        all = above(values, count, 0, true);
    }
    return keep(values, count, all, 0, d->top_p * all.mass, space.candidates);
}

/* `sums` become those of what is kept; returns their sum. `least_end` is where the last kept of the least weights ends. */
static double sum_kept(const float *weights, int64_t vocab, Kept kept, double *sums, int64_t *least_end)
{
    int64_t left = kept.num_least;
    double total = 0;
    *least_end = 0;
    for (int64_t first = 0; first < vocab; first += SUMMED) {
        Share share = above(weights + first, SUMMED, kept.least, true);
        if (left) {
            const int64_t equal = above(weights + first, SUMMED, before(kept.least), false).count - share.count;
            int64_t taken = equal < left ? equal : left;
            left -= taken;
            share.mass += taken * (double)kept.least;
            *least_end = taken < equal ? first : first + SUMMED;
            for (; taken < equal && taken; ++*least_end)
                taken -= weights[*least_end] == kept.least;
        }
        total += sums[first / SUMMED] = share.mass;
    }
    return total;
}

/* Inverts the cumulative weights: the first place at which they are above `uniform` of all that is kept. */
static int32_t pick(const float *weights, int64_t vocab, Kept kept, double uniform, double *sums)
{
    double total = 0, cumulative = 0;
    int64_t least_end = 0, first = 0, found = 0;
    if (kept.least > 0)
        total = sum_kept(weights, vocab, kept, sums, &least_end);
    else
        for (int64_t i = 0; i * SUMMED < vocab; i++)
            total += sums[i];
    const double target = total * uniform;
    for (; first + SUMMED < vocab && cumulative + sums[first / SUMMED] <= target; first += SUMMED)
        cumulative += sums[first / SUMMED];
    const float to_least = least_end ? before(kept.least) : kept.least;
    for (int64_t i = first; i < first + SUMMED && cumulative <= target; i++) {
        if (weights[i] > (i < least_end ? to_least : kept.least)) {
            found = i;
            cumulative += weights[i];
        }
    }
    return (int32_t)found;
}

static enum Outcome sample(const Draw *d, const float *logits, int64_t vocab, Workspace space, int32_t *token)
{
    bool is_unfit;
    float maximum = largest(logits, vocab, &is_unfit);
    if (is_unfit || maximum == -INFINITY)
        return NOT_FINITE;
    if (is_edited(d)) {
        memcpy(space.weights, logits, vocab * sizeof(float));
        logits = space.weights;
        edit(d, space.weights, vocab);
        maximum = largest(logits, vocab, &is_unfit);
        if (is_unfit || maximum == -INFINITY)
            return is_unfit ? NOT_FINITE : NO_TOKEN_LEFT;
    }
    if (d->temperature == 0) {
        *token = place_of(logits, vocab, maximum);
        return DRAWN;
    }
    const Share all = weigh(d, logits, vocab, maximum, space);
    *token = pick(space.weights, vocab, filter(d, vocab, all, space), d->uniform, space.sums);
    return DRAWN;
}
