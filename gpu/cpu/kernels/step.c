/* A whole decoder step in one call: mixed decode rows and prefill chunks, all layers, logits or greedy tokens.
 *
 * Every thread of the team walks through the same phases and takes its share of each; a barrier stands between phases,
 * since each reads what another thread wrote. Linear layers are shared out by panels of columns (and row groups where there
 * are few panels), decode rows in runs that hold equally many keys, chunks and groups as items of a common counter.
 * All rows' keys and values are written before any row attends. In the last layer only rows that sample go on after it.
 */
#include <math.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "repertory.h"

enum { MAX_PARTS = 16 }; /* of one chunk and head, for several threads */

typedef struct {
    const Model *m;
    Step *s;
    const Kernels *k;
    Team *team;
    int64_t size; /* of an element, bytes */
    atomic_long next_chunk, next_group; /* items taken, counted on from layer to layer */
    double lap; /* thread 0's */
} Work;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* Thread 0's time since the last call goes to a phase. */
static void book(Work *w, int64_t thread, enum Phase phase)
{
    if (thread == 0) {
        double time = now();
        w->s->seconds[phase] += time - w->lap;
        w->lap = time;
    }
}

/* Ends a phase: waits for all, and books the time since the last one's end. */
static void end_phase(Work *w, int64_t thread, enum Phase phase)
{
    team_barrier(w->team, thread);
    book(w, thread, phase);
}

/* Thread `thread`'s share of `count` things: [*first, result). */
static int64_t share(const Work *w, int64_t thread, int64_t count, int64_t *first)
{
    *first = count * thread / team_size(w->team);
    return count * (thread + 1) / team_size(w->team);
}

static char *row_of(const Work *w, const void *base, int64_t row, int64_t width)
{
    return (char *)base + row * width * w->size;
}

static void *scratch_of(const Work *w, int64_t thread) { return w->m->scratch + thread * w->m->scratch_bytes; }

static void linear(const Work *w, int64_t thread, Linear l)
{
    enum { FEWEST_ROWS = 64, SHARES = 4 };
    const int64_t panels = (l.n + w->k->panel - 1) / w->k->panel, threads = team_size(w->team);
    int64_t groups = 1; /* of rows, so that every thread finds SHARES pieces */
    while (threads > 1 && panels * groups < SHARES * threads && l.m / (groups + 1) >= FEWEST_ROWS)
        groups++;
    const int64_t rows = (l.m + groups * 32 - 1) / (groups * 32) * 32;
    int64_t piece, last = share(w, thread, panels * groups, &piece);
    const int64_t y_size = l.epilogue == LOGITS ? (int64_t)sizeof(float) : w->size;
    while (piece < last) {
        int64_t group = piece / panels, panel = piece % panels, end = (group + 1) * panels < last ? (group + 1) * panels : last;
        Linear part = l;
        part.x = row_of(w, l.x, group * rows, l.x_stride);
        part.y = (char *)l.y + group * rows * l.y_stride * y_size;
        part.m = l.m - group * rows < rows ? l.m - group * rows : rows;
        if (part.m > 0)
            w->k->linear(&part, panel, panel + end - piece, scratch_of(w, thread));
        piece = end;
    }
}

static void norm(const Work *w, int64_t thread, const void *weight, int64_t rows)
{
    const Model *m = w->m;
    int64_t first, last = share(w, thread, rows, &first);
    w->k->rms_norm(row_of(w, m->x, first, m->hidden), weight, row_of(w, m->normed, first, m->hidden), last - first, m->hidden,
                   (float)m->eps);
}

static Attention attention_of(const Work *w, int64_t layer)
{
    const Model *m = w->m;
    char *keys = m->pool + layer * m->layer_stride * w->size;
    return (Attention){
        .keys = keys,
        .values = keys + m->value_offset * w->size,
        .block_size = m->block_size,
        .block_stride = m->block_stride,
        .token_stride = m->token_stride,
        .num_heads = m->num_heads,
        .num_kv_heads = m->num_kv_heads,
        .head_dim = m->head_dim,
        .queries = m->qkv,
        .query_stride = (m->num_heads + 2 * m->num_kv_heads) * m->head_dim,
        .output = m->attended,
        .state = w->s->state,
    };
}

static void rotate(const Work *w, int64_t thread, const Attention *a)
{
    const Rotation rotation = {w->m->qkv,    a->keys,         a->values,  w->s->slots, w->s->rotation,
                               a->num_heads, a->num_kv_heads, a->head_dim};
    int64_t first, last = share(w, thread, w->s->num_tokens, &first);
    w->k->rotate(&rotation, first, last);
}

static void attend_groups(Work *w, int64_t thread, const Attention *a, int64_t layer)
{
    const Step *s = w->s;
    const int64_t per_layer = s->num_groups * a->num_kv_heads, group = a->num_heads / a->num_kv_heads;
    const int64_t end = (layer + 1) * per_layer;
    for (;;) {
        int64_t item = atomic_load(&w->next_group);
        if (item >= end)
            return;
        if (!atomic_compare_exchange_weak(&w->next_group, &item, item + 1))
            continue;
        const Group *g = &s->groups[item % per_layer / a->num_kv_heads];
        const Run run = {.table = s->tables + s->decodes[s->members[g->member]].table,
                         .keys = g->keys,
                         .num_tokens = g->count,
                         .members = s->members + g->member,
                         .decodes = s->decodes,
                         .kv_head = item % a->num_kv_heads,
                         .last_query = g->count * group};
        w->k->attend_run(a, &run, scratch_of(w, thread));
    }
}

/* Into how many parts the heads of decode rows are divided: for fewer rows than threads have use for, more than one. */
static int64_t head_parts(const Work *w)
{
    const int64_t threads = team_size(w->team), wanted = (2 * threads + w->s->num_decodes - 1) / w->s->num_decodes;
    return threads == 1 ? 1 : wanted < w->m->num_kv_heads ? wanted : w->m->num_kv_heads;
}

/* Each thread takes the rows whose keys lie in its share of all keys, counted over rows and then parts of the heads. */
static void attend_decodes(const Work *w, int64_t thread, const Attention *a)
{
    const Step *s = w->s;
    const int64_t threads = team_size(w->team), parts = head_parts(w);
    int64_t total = 0, before = 0;
    for (int64_t i = 0; i < s->num_decodes; i++)
        total += s->decodes[i].context - s->decodes[i].shared;
    for (int64_t part = 0; part < parts; part++) {
        int64_t first = s->num_decodes, last = 0;
        for (int64_t i = 0; i < s->num_decodes; i++) {
            const int64_t keys = s->decodes[i].context - s->decodes[i].shared, middle = before + keys / 2;
            before += keys;
            if (middle * threads / (total * parts) == thread) {
                first = i < first ? i : first;
                last = i + 1;
            }
        }
        if (first < last)
            w->k->attend_decodes(a, s->tables, s->decodes, first, last, a->num_kv_heads * part / parts,
                                 a->num_kv_heads * (part + 1) / parts, scratch_of(w, thread));
    }
}

static void attend_chunks(Work *w, int64_t thread, const Attention *a, int64_t layer)
{
    const Step *s = w->s;
    const int64_t parts = team_size(w->team) == 1 ? 1 : MAX_PARTS, group = a->num_heads / a->num_kv_heads;
    const int64_t per_layer = s->num_chunks * a->num_kv_heads * parts, end = (layer + 1) * per_layer;
    for (;;) {
        int64_t item = atomic_load(&w->next_chunk);
        if (item >= end)
            return;
        if (!atomic_compare_exchange_weak(&w->next_chunk, &item, item + 1))
            continue;
        const int64_t index = item % per_layer, part = parts - 1 - index % parts; /* the longest first */
        const Chunk *c = &s->chunks[index / parts / a->num_kv_heads];
        const int64_t blocks = (c->count * group + 31) / 32, first = blocks * part / parts * 32;
        Run run = {.table = s->tables + c->table,
                   .num_tokens = c->count,
                   .token = c->token,
                   .first_limit = c->context - c->count + 1,
                   .kv_head = index / parts % a->num_kv_heads,
                   .first_query = first,
                   .last_query = blocks * (part + 1) / parts * 32};
        run.last_query = run.last_query < c->count * group ? run.last_query : c->count * group;
        if (run.first_query >= run.last_query)
            continue;
        run.keys = run.first_limit + (run.last_query - 1) / group;
        w->k->attend_run(a, &run, scratch_of(w, thread));
    }
}

/* Keeps only the rows that sample, in the residual and in what attention found. Returns how many there are. */
static int64_t keep_samples(const Work *w, int64_t thread)
{
    const Model *m = w->m;
    const int64_t width = m->num_heads * m->head_dim;
    for (int64_t i = 0; thread == 0 && i < w->s->num_samples; i++) {
        int64_t from = w->s->sample_at[i]; /* never before i: indices rise */
        memmove(row_of(w, m->x, i, m->hidden), row_of(w, m->x, from, m->hidden), m->hidden * w->size);
        memmove(row_of(w, m->attended, i, width), row_of(w, m->attended, from, width), width * w->size);
    }
    team_barrier(w->team, thread);
    return w->s->num_samples;
}

static void attend(Work *w, int64_t thread, int64_t layer)
{
    const Attention a = attention_of(w, layer);
    rotate(w, thread, &a);
    end_phase(w, thread, ROTATE);
    if (layer == w->m->num_layers - 1 && w->s->num_samples == 0)
        return;
    if (w->s->num_groups) {
        attend_groups(w, thread, &a, layer);
        end_phase(w, thread, SHARED);
    }
    if (w->s->num_decodes) {
        attend_decodes(w, thread, &a);
        if (!w->s->num_chunks || team_size(w->team) == 1)
            end_phase(w, thread, DECODES);
    }
    if (w->s->num_chunks) {
        attend_chunks(w, thread, &a, layer);
        end_phase(w, thread, CHUNKS);
    }
}

static void feed_forward(Work *w, int64_t thread, const Layer *layer, int64_t rows)
{
    const Model *m = w->m;
    const int64_t width = m->num_heads * m->head_dim;
    linear(w, thread, (Linear){m->attended, width, rows, layer->attention_out, m->hidden, width, m->x, m->hidden, ADD});
    end_phase(w, thread, ATTENTION_OUT);
    norm(w, thread, layer->post_attention_norm, rows);
    end_phase(w, thread, NORM);
    linear(w, thread, (Linear){m->normed, m->hidden, rows, layer->gate_up, 2 * m->intermediate, m->hidden, m->inner,
                               m->intermediate, SILU_MUL});
    end_phase(w, thread, GATE_UP);
    linear(w, thread, (Linear){m->inner, m->intermediate, rows, layer->down, m->hidden, m->intermediate, m->x, m->hidden, ADD});
    end_phase(w, thread, DOWN);
}

/* Takes the largest of a slice of logits, [samples, width] from column `first` on, into the thread's best. */
static void take_best(const Work *w, const float *logits, int64_t first, int64_t width, int64_t stride, Best *best)
{
    for (int64_t row = 0; row < w->s->num_samples; row++, logits += stride) {
        bool is_unfit;
        const float logit = w->k->largest(logits, width, &is_unfit);
        best[row].is_unfit |= is_unfit;
        if (is_unfit || !(logit > best[row].logit))
            continue;
        int64_t token = 0;
        while (logits[token] != logit)
            token++;
        best[row].logit = logit;
        best[row].token = first + token;
    }
}

/* The argmax of each sample. The logits go to a slice of memory that stays in L2 and are looked at there; all of them would
 * be written to memory and read again, which for many rows is as much as the weights. */
static void greedy(Work *w, int64_t thread)
{
    enum { SLICE = 48 << 10 }; /* floats */
    const Model *m = w->m;
    const Step *s = w->s;
    const int64_t panel = w->k->panel, panels = (m->vocab + panel - 1) / panel;
    int64_t first, last = share(w, thread, panels, &first), per_slice = SLICE / (panel * s->num_samples);
    Best *best = s->best + thread * s->num_samples;
    float *logits = s->logits + first * panel * s->num_samples;
    for (int64_t row = 0; row < s->num_samples; row++)
        best[row] = (Best){-INFINITY, 0, 0};
    for (; first < last; first += per_slice) {
        per_slice = per_slice < 1 ? 1 : per_slice > last - first ? last - first : per_slice;
        const int64_t column = first * panel, stride = per_slice * panel;
        const int64_t width = m->vocab - column < stride ? m->vocab - column : stride;
        const char *weights = row_of(w, m->lm_head, column, m->hidden);
        const Linear l = {m->normed, m->hidden, s->num_samples, weights, width, m->hidden, logits, stride, LOGITS};
        w->k->linear(&l, 0, per_slice, scratch_of(w, thread));
        book(w, thread, HEAD);
        take_best(w, logits, column, width, stride, best);
        book(w, thread, SAMPLE);
    }
    team_barrier(w->team, thread);
    for (int64_t row = 0; thread == 0 && row < s->num_samples; row++) {
        for (int64_t other = 1; other < team_size(w->team); other++) {
            const Best *theirs = &s->best[other * s->num_samples + row];
            best[row].is_unfit |= theirs->is_unfit;
            if (theirs->logit > best[row].logit)
                best[row] = (Best){theirs->logit, theirs->token, best[row].is_unfit};
        }
        s->tokens[row] = best[row].token;
        s->finite[row] = best[row].logit > -INFINITY && !best[row].is_unfit;
    }
    book(w, thread, SAMPLE);
}

static void head(Work *w, int64_t thread)
{
    const Model *m = w->m;
    Step *s = w->s;
    const int64_t stride = (m->vocab + w->k->panel - 1) / w->k->panel * w->k->panel;
    norm(w, thread, m->final_norm, s->num_samples);
    end_phase(w, thread, NORM);
    if (!s->logits)
        return;
    if (s->tokens)
        greedy(w, thread);
    else
        linear(w, thread,
               (Linear){m->normed, m->hidden, s->num_samples, m->lm_head, m->vocab, m->hidden, s->logits, stride, LOGITS});
    end_phase(w, thread, HEAD);
}

static void work(void *argument, int64_t thread)
{
    Work *w = argument;
    const Model *m = w->m;
    int64_t rows = w->s->num_tokens, first, last = share(w, thread, rows, &first);
    for (int64_t i = first; i < last; i++)
        memcpy(row_of(w, m->x, i, m->hidden), row_of(w, m->embedding, w->s->token_ids[i], m->hidden), m->hidden * w->size);
    end_phase(w, thread, EMBED);
    for (int64_t i = 0; i < m->num_layers; i++) {
        const Layer *layer = &m->layers[i];
        const int64_t width = (m->num_heads + 2 * m->num_kv_heads) * m->head_dim;
        norm(w, thread, layer->input_norm, rows);
        end_phase(w, thread, NORM);
        linear(w, thread, (Linear){m->normed, m->hidden, rows, layer->qkv, width, m->hidden, m->qkv, width, PLAIN});
        end_phase(w, thread, QKV);
        attend(w, thread, i);
        if (i == m->num_layers - 1)
            rows = keep_samples(w, thread);
        if (rows)
            feed_forward(w, thread, layer, rows);
    }
    if (rows)
        head(w, thread);
}

static Work begin(const Model *model, Step *step, Team *team)
{
    Work w = {.m = model, .s = step, .k = find_kernels(model->level, model->is_bf16), .team = team};
    w.size = model->is_bf16 ? sizeof(bf16) : sizeof(float);
    w.lap = now();
    return w;
}

/* Runs a step; Step's outputs and seconds are filled. */
EXPORT void run_step(const Model *model, Step *step, Team *team)
{
    Work w = begin(model, step, team);
    team_run(team, work, &w);
}

typedef struct {
    Work work;
    Linear linear;
} Head;

static void head_part(void *argument, int64_t thread)
{
    Head *h = argument;
    linear(&h->work, thread, h->linear);
    end_phase(&h->work, thread, HEAD);
}

/* Logits [count + 32, vocab rounded up to a panel] of samples [first, first + count) of a step that was run without. */
EXPORT void run_head(const Model *model, Step *step, int64_t first, int64_t count, float *logits, Team *team)
{
    Head h = {.work = begin(model, step, team)};
    const int64_t panel = h.work.k->panel;
    h.linear = (Linear){row_of(&h.work, model->normed, first, model->hidden), model->hidden, count, model->lm_head,
                        model->vocab, model->hidden, logits, (model->vocab + panel - 1) / panel * panel, LOGITS};
    team_run(team, head_part, &h);
}
