/* All layers of a decoder on a CPU in one call: with few tokens, separate calls for the parts of a layer take longer than
 * the computation.
 */

#include "cpu_attention.h"
#include "cpu_kernels.h"
#include "cpu_products.h"

/* Rows that go through the widest products at once: for a long prompt, their intermediates would take most of the memory. */
#define WIDE_ROWS 512
/* Read by the caller, which allocates buffers for them. */
const long keepsight_wide_rows = WIDE_ROWS;

/* A layer's products. */
typedef enum { QKV, OUT, GATE, UP, DOWN, PRODUCTS } part;
/* Checked by the caller, which describes each. */
const long keepsight_products_of_layer = PRODUCTS;

/* The part that is the same for all steps; the inputs and outputs of products are not set. */
typedef struct {
    /* Scales of norms [size]; null if the layer has no such norm. */
    const float *before_attention, *after_attention, *before_feed_forward, *after_feed_forward;
    const float *of_heads; /* [heads + kv_heads, dim]; null if queries and keys have no norm */
    product_work products[PRODUCTS];
    long base; /* index of its rotary base */
} layer;

/* The low-rank term that an adapter adds to a product. Without weights it adds nothing. */
typedef struct {
    product_work down, up;
} low_rank;

/* Rows [first, end) use one adapter. */
typedef struct {
    long first, end;
    const low_rank *products; /* [num_layers, PRODUCTS] */
} adapted_rows;

typedef struct {
    const adapted_rows *each; /* in row order */
    long count;
} adapted;

typedef struct {
    float *hidden; /* [tokens, size]: input of the first layer, replaced by the output of the last */
    const layer *layers;
    void *const *keys, *const *values;    /* per layer [slots, kv_heads, dim] */
    const attention_work *const *sights;  /* per layer: the intervals that rows see; inputs and outputs are not set */
    const float *cos, *sin;               /* [bases, tokens, dim] */
    const int64_t *slots;                 /* [tokens] */
    const int64_t *read;                  /* [num_read]: tokens read from the last layer; unused if all are */
    /* Buffers for intermediate results of a layer. */
    float *normed;    /* [tokens, size] */
    float *projected; /* [tokens, heads + 2 * kv_heads, dim], later the output of attention */
    float *query;     /* [tokens, heads, dim] */
    float *gate, *up; /* [WIDE_ROWS, or tokens if those are fewer, outputs of either] */
    long num_read;
    long first, end, num_layers;          /* layers [first, end) of all */
    long tokens, size, heads, kv_heads, dim;
    long is_rounded; /* keys and values are kept in bfloat16 */
    float eps;
    adapted of_all, of_read; /* adapters among all tokens, and among those that are read */
    float *narrow;           /* buffer, if there are adapters: [tokens, outputs of the widest `down`] */
} decoder_work;

static void norm(const decoder_work *w, float *out, const float *hidden, const float *scale, const float *residual, long rows)
{
    keepsight_norm(&(norm_work){out, hidden, scale, residual, rows, w->size, w->eps});
}

/* Some rows of a layer. */
typedef struct {
    const decoder_work *w;
    long index;     /* of the layer */
    adapted adapters; /* of all rows from which these are taken */
    long first, count;
} rows_of_layer;

static void add_low_rank(low_rank l, float *out, const float *hidden, float *narrow, long rows)
{
    l.down.out = narrow, l.down.hidden = hidden, l.down.rows = rows;
    keepsight_multiply(&l.down);
    l.up.out = out, l.up.hidden = narrow, l.up.rows = rows, l.up.is_onto = 1;
    keepsight_multiply(&l.up);
}

static void add_adapters(rows_of_layer r, part which, float *out, const float *hidden)
{
    for (long i = 0; i < r.adapters.count; i++) {
        const adapted_rows its = r.adapters.each[i];
        const low_rank l = its.products[r.index * PRODUCTS + which];
        const long first = its.first > r.first ? its.first - r.first : 0, end = lesser(its.end - r.first, r.count);
        if (first < end && l.down.weight)
            add_low_rank(l, out + first * l.up.outputs, hidden + first * l.down.inputs, r.w->narrow, end - first);
    }
}

/* The adapters' terms are computed first and the product is added to them, so that the activation applies to the sum. Other
 * rows start at zero. */
static void multiply(
    rows_of_layer r, part which, float *out, const float *hidden, const float *times, int is_onto)
{
    product_work work = r.w->layers[r.index].products[which];
    if (r.adapters.count) {
        if (!is_onto)
            memset(out, 0, r.count * work.outputs * sizeof *out);
        is_onto = 1;
        add_adapters(r, which, out, hidden);
    }
    work.out = out, work.hidden = hidden, work.times = times, work.rows = r.count, work.is_onto = is_onto;
    keepsight_multiply(&work);
}

/* Add a product to the hidden states, normed first if there is a scale. */
static void add_product(rows_of_layer r, part which, float *hidden, const float *others, const float *scale)
{
    const decoder_work *w = r.w;
    multiply(r, which, scale ? w->normed : hidden, others, 0, !scale);
    if (scale)
        norm(w, hidden, w->normed, scale, hidden, r.count);
}

/* Move the rows that are read to the front. */
static void gather(float *rows, const int64_t *read, long count, long size)
{
    for (long i = 0; i < count; i++)
        memmove(rows + i * size, rows + read[i] * size, size * sizeof *rows);
}

static void attend(rows_of_layer all, rows_of_layer read)
{
    const decoder_work *w = all.w;
    const layer *l = w->layers + all.index;
    const long angles = l->base * w->tokens * w->dim;
    norm(w, w->normed, w->hidden, l->before_attention, 0, w->tokens);
    multiply(all, QKV, w->projected, w->normed, 0, 0);
    keepsight_place_heads(&(heads_work){
        .query = w->query, .keys = w->keys[all.index], .values = w->values[all.index], .projected = w->projected,
        .scale = l->of_heads, .cos = w->cos + angles, .sin = w->sin + angles, .slots = w->slots, .tokens = w->tokens,
        .heads = w->heads, .kv_heads = w->kv_heads, .dim = w->dim, .is_rounded = w->is_rounded, .eps = w->eps});
    if (read.count < w->tokens) {
        gather(w->query, w->read, read.count, w->heads * w->dim);
        gather(w->hidden, w->read, read.count, w->size);
    }
    attention_work sight = *w->sights[all.index];
    sight.out = w->projected, sight.query = w->query;
    sight.keys = w->keys[all.index], sight.values = w->values[all.index];
    keepsight_attend(&sight);
    add_product(read, OUT, w->hidden, w->projected, l->after_attention);
}

static void feed_forward(rows_of_layer all)
{
    const decoder_work *w = all.w;
    const layer *l = w->layers + all.index;
    for (rows_of_layer some = all; some.first < all.count; some.first += WIDE_ROWS) {
        some.count = lesser(all.count - some.first, WIDE_ROWS);
        float *hidden = w->hidden + some.first * w->size;
        norm(w, w->normed, hidden, l->before_feed_forward, 0, some.count);
        multiply(some, GATE, w->gate, w->normed, 0, 0);
        multiply(some, UP, w->up, w->normed, w->gate, 0);
        add_product(some, DOWN, hidden, w->up, l->after_feed_forward);
    }
}

/* Compute layers [first, end); writes keys and values of all tokens to their slots. */
void keepsight_decode(const decoder_work *w)
{
    for (long index = w->first; index < w->end; index++) {
        const rows_of_layer all = {w, index, w->of_all, 0, w->tokens};
        const rows_of_layer read = {w, index, w->of_read, 0, w->num_read};
        const rows_of_layer given = index == w->num_layers - 1 ? read : all;
        attend(all, given);
        feed_forward(given);
    }
}
