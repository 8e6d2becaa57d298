/* Where the keys and values of decode rows lie, and how they come to the cache; for amx_decode.h.
 *
 * A step is four pages of 16 keys. Beside all of its work, evenly (memory would idle after a burst), the next step's pages are
 * fetched. What limits that is the CPU's own prefetching, which runs ahead of ours in each 4 KiB and begins anew in the next:
 * so all pages of a step are fetched side by side, a line of each at a time. Scattered blocks one behind the other reach
 * 11 GB/s here, side by side 15, one long stream 16; fetching only every second line is slower than the first (measured).
 */

enum { PAGES = 4 };

/* A walk over rows' pages of 16 keys, for some of the KV heads. */
typedef struct {
    const Attention *a;
    const int32_t *tables;
    const Decode *rows;
    int64_t last_row, first_kv_head, last_kv_head, group;
    uint32_t lines; /* of one side of a page, to fetch */
    uint32_t lines_together; /* that lie one behind the other: all of them, or a token's */
} Walk;

/* A step's pages, of the walk's first head. */
typedef struct {
    const bf16 *keys[PAGES], *values[PAGES];
    int64_t stride; /* elements between tokens */
} Pages;

/* The next step's pages on their way to the cache. A side: the keys or the values of a page. */
typedef struct {
    const char *sides[2 * PAGES];
    uint32_t count; /* of sides */
    uint32_t line, lines; /* of each side: fetched, and in all */
    uint32_t cost, due; /* work to be done beside one line of each side, and done since the last; any unit */
    uint32_t lines_together; /* that lie one behind the other: all of them, or a token's */
    int64_t token_bytes;
} PageFetch;

/* Copies a step's keys and values where pages are not whole tiles. */
static void copy_pages(Pages *p, const Walk *w, const Decode *r, int64_t first, bf16 *copy)
{
    const Attention *a = w->a;
    const int64_t width = (w->last_kv_head - w->first_kv_head) * a->head_dim;
    p->stride = width;
    for (int64_t i = 0; i < PAGES * 16 && first + i < r->context; i++) {
        int64_t here = pool_offset(a, w->tables + r->table, first + i) + w->first_kv_head * a->head_dim;
        memcpy(copy + i * width, (const bf16 *)a->keys + here, width * sizeof(bf16));
        memcpy(copy + (PAGES * 16 + i) * width, (const bf16 *)a->values + here, width * sizeof(bf16));
    }
    for (int64_t i = 0; i < PAGES; i++) {
        p->keys[i] = copy + i * 16 * width;
        p->values[i] = copy + (PAGES + i) * 16 * width;
    }
}

static void find_pages(Pages *p, const Walk *w, int64_t row, int64_t page, int64_t pages, bf16 *copy)
{
    const Attention *a = w->a;
    const Decode *r = &w->rows[row];
    if (a->block_size % 16) {
        copy_pages(p, w, r, r->shared + page * 16, copy);
        return;
    }
    const bf16 *keys = (const bf16 *)a->keys + w->first_kv_head * a->head_dim;
    const bf16 *values = (const bf16 *)a->values + w->first_kv_head * a->head_dim;
    p->stride = a->token_stride;
    for (int64_t i = 0; i < pages; i++) {
        const int64_t here = pool_offset(a, w->tables + r->table, r->shared + (page + i) * 16);
        p->keys[i] = keys + here;
        p->values[i] = values + here;
    }
}

/* Begins to fetch the step at `page` of row `row`, or the next row's first where there is none, beside `work`. */
static void start_fetch(PageFetch *f, const Walk *w, int64_t row, int64_t page, int64_t work)
{
    const Attention *a = w->a;
    const Decode *r = &w->rows[row];
    *f = (PageFetch){.lines = w->lines, .lines_together = w->lines_together, .cost = work / w->lines};
    f->token_bytes = a->token_stride * sizeof(bf16);
    if (r->shared + page * 16 >= r->context) {
        page = 0;
        r++;
    }
    if (r == w->rows + w->last_row || a->block_size % 16) {
        f->line = f->lines;
        return;
    }
    const int64_t column = w->first_kv_head * a->head_dim;
    for (int64_t key = r->shared + page * 16; f->count < 2 * PAGES && key < r->context; key += 16) {
        const int64_t here = pool_offset(a, w->tables + r->table, key) + column;
        f->sides[f->count++] = (const char *)((const bf16 *)a->keys + here);
        f->sides[f->count++] = (const char *)((const bf16 *)a->values + here);
    }
}

/* Fetches what is due after some more work. Always inlined, like fetch_lines. */
INLINE void fetch_beside(PageFetch *f, uint32_t work)
{
    for (f->due += work; f->due >= f->cost && f->line < f->lines; f->line++) {
        int64_t offset = 64 * f->line;
        f->due -= f->cost;
        if (f->lines_together != f->lines)
            offset = f->line / f->lines_together * f->token_bytes + f->line % f->lines_together * 64;
        if (f->count == 2 * PAGES) {
#pragma GCC unroll 8
            for (uint32_t side = 0; side < 2 * PAGES; side++)
                _mm_prefetch(f->sides[side] + offset, _MM_HINT_T1);
        } else {
            for (uint32_t side = 0; side < f->count; side++)
                _mm_prefetch(f->sides[side] + offset, _MM_HINT_T1);
        }
    }
}
