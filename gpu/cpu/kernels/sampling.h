/* Draws of tokens from logits: the contract between Python (ctypes, numpy) and C, mirrored in ../sampler.py. */
#ifndef SAMPLING_H
#define SAMPLING_H

#include "repertory.h"

enum { NUM_MASKS = 2 };

/* How one row is drawn. Arrays may be NULL where their number is 0. Ids are below the vocabulary's size and, but for
 * `barred`, not repeated. */
typedef struct {
    double uniform; /* in [0, 1) */
    double top_p;
    int64_t top_k; /* as large as the vocabulary: off */
    const int32_t *masks[NUM_MASKS]; /* NULL, or bit i of word j: token 32 j + i may be chosen; none behind the last word */
    int64_t num_words[NUM_MASKS];
    const int32_t *barred; /* tokens that may not be chosen */
    const int32_t *bias_ids;
    const float *bias;
    const int32_t *seen; /* tokens to penalise: positive logits are divided by `repetition`, others multiplied, */
    const float *penalties; /* and then this is subtracted */
    int64_t num_barred, num_bias, num_seen;
    float temperature; /* 0: the largest logit */
    float min_p;
    float repetition;
    int32_t unused;
} Draw;

enum Outcome { DRAWN, NOT_FINITE, NO_TOKEN_LEFT };

typedef struct {
    const float *logits; /* [num_draws, stride], not changed */
    int64_t stride, vocab, num_draws;
    const Draw *draws;
    float *scratch; /* [threads, sample_floats(vocab)] */
    int32_t *tokens; /* [num_draws] */
    uint8_t *outcomes; /* [num_draws], enum Outcome; but for DRAWN the token means nothing */
} Sampling;

/* Elements whose weights are summed together. */
enum { SUMMED = 512 };

/* Room for one row's work. `weights` and `candidates` hold the vocabulary rounded up to SUMMED, and as much as a vector. */
typedef struct {
    float *weights, *candidates;
    double *sums;
} Workspace;

typedef enum Outcome Sampler(const Draw *draw, const float *logits, int64_t vocab, Workspace space, int32_t *token);

Sampler sample_base, sample_avx2, sample_avx512;

#endif
