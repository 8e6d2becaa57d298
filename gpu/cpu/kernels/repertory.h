/* The CPU step's contract between Python (ctypes) and C, and between the layer loop and its kernels.
 *
 * Every struct here is mirrored field by field in library.py; change both and count ABI up.
 * "Element" is what weights, activations and KV are made of: float, or bf16 (the upper half of a float).
 * Arithmetic between loading and storing elements is float everywhere. Strides count elements.
 */
#ifndef REPERTORY_H
#define REPERTORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ABI = 3 };

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

/* Instruction sets, each with its table of kernels; AMX is bf16 only. */
enum Level { BASE, AVX2, AVX512, AMX, NUM_LEVELS };

/* What a linear layer does with its product: y = p; y += p; y = silu(gate) * up; y (float) = p. */
enum Epilogue { PLAIN, ADD, SILU_MUL, LOGITS };

/* y[m, n] from x[m, k] and packed weights [n, k]. SILU_MUL has interleaved weights and writes n / 2 columns.
 * x is readable up to a multiple of 32 rows. y_stride is at least n, rounded up to whole panels for LOGITS. */
typedef struct {
    const void *x;
    int64_t x_stride, m;
    const void *weights;
    int64_t n, k;
    void *y;
    int64_t y_stride;
    int64_t epilogue;
} Linear;

/* One layer of the KV pool and the heads that look at it. Slot s of block b: keys + b * block_stride + s * token_stride. */
typedef struct {
    void *keys, *values;
    int64_t block_size, block_stride, token_stride;
    int64_t num_heads, num_kv_heads, head_dim;
    const void *queries; /* [tokens, query_stride], the heads of a token one behind the other */
    int64_t query_stride;
    void *output; /* [tokens, num_heads * head_dim] */
    float *state; /* [decode rows, num_heads, head_dim + STATE_EXTRA]; see Group */
} Attention;

/* A softmax that is not finished: the weighted sum of values, then its maximum (of scores times log2 e) and sum. */
enum { STATE_EXTRA = 16, STATE_MAXIMUM = 0, STATE_SUM = 1 };

/* A row of one token: it attends to `context` keys, of which the first `shared` are already in its state. */
typedef struct {
    int32_t token, context, shared, table; /* `table`: where its block table begins in Step.tables */
} Decode;

/* A row of several tokens, the last `count` of `context`: token i sees context - count + 1 + i keys. */
typedef struct {
    int32_t token, count, context, table;
} Chunk;

/* Decode rows that begin with the same `keys` keys. What they get from those goes to their states. */
typedef struct {
    int32_t member, count, keys, unused; /* members[member : member + count] are indices of decode rows */
} Group;

/* Query rows against one run of keys: a chunk (limits rise by one a token) or a group (all see all keys). */
typedef struct {
    const int32_t *table;
    int64_t keys;
    int64_t num_tokens;
    const int32_t *members; /* groups: decode rows; NULL for a chunk */
    const Decode *decodes;
    int64_t token; /* chunks: the first token */
    int64_t first_limit; /* chunks: keys that it sees */
    int64_t kv_head;
    int64_t first_query, last_query; /* of the num_tokens * (num_heads / num_kv_heads) rows, token by token */
} Run;

/* A rotation and the place in the pool for each token of qkv [tokens, (num_heads + 2 * num_kv_heads) * head_dim]. */
typedef struct {
    void *qkv;
    void *keys, *values;
    const int64_t *slots; /* element offsets of the tokens in keys and values */
    const float *rotation; /* [tokens, head_dim]: cosines, then sines */
    int64_t num_heads, num_kv_heads, head_dim;
} Rotation;

/* What attend_decodes needs of scratch for each KV head, and keys that it copies where blocks are not multiples of 16. */
enum { PACK_BYTES = 40 << 10, COPIED_KEYS = 64 };

/* The kernels of one level and element. `scratch` is the calling thread's, as large as scratch_bytes says. */
typedef struct {
    int64_t panel; /* columns that are packed together; packed weights have n rounded up to it */
    void (*pack)(const void *weights, void *packed, int64_t n, int64_t k, bool interleave);
    void (*linear)(const Linear *linear, int64_t first_panel, int64_t last_panel, void *scratch);
    void (*rms_norm)(const void *x, const void *weight, void *y, int64_t rows, int64_t width, float eps);
    void (*rotate)(const Rotation *rotation, int64_t first_token, int64_t last_token);
    void (*attend_decodes)(const Attention *a, const int32_t *tables, const Decode *rows, int64_t first, int64_t last,
                           int64_t first_kv_head, int64_t last_kv_head, void *scratch);
    void (*attend_run)(const Attention *a, const Run *run, void *scratch);
    float (*largest)(const float *logits, int64_t width, bool *is_unfit);
} Kernels;

typedef struct {
    const void *input_norm, *qkv, *attention_out, *post_attention_norm, *gate_up, *down;
} Layer;

/* A model, its KV pool and the buffers of its activations; all memory is the caller's. */
typedef struct {
    int64_t level, is_bf16;
    int64_t num_layers, num_heads, num_kv_heads, head_dim, hidden, intermediate, vocab;
    double eps;
    const Layer *layers;
    const void *embedding, *final_norm, *lm_head;
    char *pool;
    int64_t block_size, block_stride, layer_stride, value_offset, token_stride; /* elements */
    void *x, *normed, *qkv, *attended, *inner; /* [max tokens + 32, width] */
    char *scratch; /* [threads, scratch_bytes] */
    int64_t scratch_bytes;
} Model;

enum Phase { EMBED, NORM, QKV, ROTATE, SHARED, DECODES, CHUNKS, ATTENTION_OUT, GATE_UP, DOWN, HEAD, SAMPLE, NUM_PHASES };

/* The largest logit of some columns of a row; minus infinity: there is none. */
typedef struct {
    float logit;
    int32_t token, is_unfit; /* is_unfit: one is NaN or plus infinity */
} Best;

typedef struct {
    int64_t num_tokens, num_decodes, num_chunks, num_groups, num_samples;
    const int32_t *token_ids;
    const int64_t *slots;
    const float *rotation;
    const int32_t *tables;
    const Decode *decodes;
    const Chunk *chunks;
    const Group *groups;
    const int32_t *members;
    const int32_t *sample_at; /* token indices, rising */
    float *state;
    float *logits; /* [samples + 32, vocab rounded up to a panel]; with `tokens`: room for the work; NULL: see run_head */
    int32_t *tokens; /* NULL, or the argmax of each sample, instead of logits */
    uint8_t *finite; /* with `tokens`: whether a row is fit to be sampled: no NaN or plus infinity, one finite logit */
    Best *best; /* with `tokens`: [threads, samples] */
    double seconds[NUM_PHASES];
} Step;

typedef struct Team Team;

/* The table for a level and element, NULL if this CPU or build has none. */
const Kernels *find_kernels(int64_t level, bool is_bf16);

extern const Kernels base_f32, base_bf16, avx2_f32, avx2_bf16, avx512_f32, avx512_bf16_kernels, amx_bf16_kernels;

Team *team_open(int64_t num_threads);
void team_close(Team *team);
int64_t team_size(const Team *team);
void team_run(Team *team, void (*work)(void *argument, int64_t thread), void *argument);
void team_barrier(Team *team, int64_t thread);

#endif
