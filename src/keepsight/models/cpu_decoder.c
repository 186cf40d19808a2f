/* A decoder's layers on a CPU, one after another: with few tokens it takes longer to ask for a layer's parts one by
 * one than to compute them.
 */

#include "cpu_attention.h"
#include "cpu_kernels.h"
#include "cpu_products.h"

/* So many go through the widest products at once: of a long prompt what lies between those would take most of the memory. */
#define WIDE_ROWS 512
/* For the caller, who makes room for them. */
const long keepsight_wide_rows = WIDE_ROWS;

/* What is the same for all steps; products and attention lack what they read and write. */
typedef struct {
    /* Scales of norms [size]; null after a part that has none. */
    const float *before_attention, *after_attention, *before_feed_forward, *after_feed_forward;
    const float *of_heads; /* [heads + kv_heads, dim]; null where queries and keys have no norm */
    product_work qkv, out, gate, up, down;
    long base; /* which of the angles */
} layer;

typedef struct {
    float *hidden; /* [tokens, size]: what the first layer is given, becomes what the last one gives */
    const layer *layers;
    void *const *keys, *const *values;    /* of each layer [slots, kv_heads, dim] */
    const attention_work *const *sights;  /* of each layer: what its rows see */
    const float *cos, *sin;               /* [bases, tokens, dim] */
    const int64_t *slots;                 /* [tokens] */
    const int64_t *read;                  /* [num_read]: tokens that are read of the last layer; unused where all are */
    /* Room for what lies between two parts of a layer. */
    float *normed;    /* [tokens, size] */
    float *projected; /* [tokens, heads + 2 * kv_heads, dim], and then what they attend to */
    float *query;     /* [tokens, heads, dim] */
    float *gate, *up; /* [WIDE_ROWS, or tokens if those are fewer, outputs of either] */
    long num_read;
    long first, end, num_layers;          /* layers [first, end) of all */
    long tokens, size, heads, kv_heads, dim;
    long is_rounded; /* keys and values are kept in bfloat16 */
    float eps;
} decoder_work;

static void norm(const decoder_work *w, float *out, const float *hidden, const float *scale, const float *residual, long rows)
{
    keepsight_norm(&(norm_work){out, hidden, scale, residual, rows, w->size, w->eps});
}

static void multiply(product_work product, float *out, const float *hidden, const float *times, long rows)
{
    product.out = out, product.hidden = hidden, product.times = times, product.rows = rows;
    keepsight_multiply(&product);
}

/* Onto the hidden states; where there is a scale it is normed before. */
static void add_product(
    const decoder_work *w, product_work product, float *hidden, const float *others, const float *scale, long rows)
{
    product.is_onto = !scale;
    multiply(product, scale ? w->normed : hidden, others, 0, rows);
    if (scale)
        norm(w, hidden, w->normed, scale, hidden, rows);
}

/* Rows that are read come to the front. */
static void gather(float *rows, const int64_t *read, long count, long size)
{
    for (long i = 0; i < count; i++)
        memmove(rows + i * size, rows + read[i] * size, size * sizeof *rows);
}

static void attend(const decoder_work *w, const layer *l, long index, long rows)
{
    const long angles = l->base * w->tokens * w->dim;
    norm(w, w->normed, w->hidden, l->before_attention, 0, w->tokens);
    multiply(l->qkv, w->projected, w->normed, 0, w->tokens);
    keepsight_place_heads(&(heads_work){
        .query = w->query, .keys = w->keys[index], .values = w->values[index], .projected = w->projected,
        .scale = l->of_heads, .cos = w->cos + angles, .sin = w->sin + angles, .slots = w->slots, .tokens = w->tokens,
        .heads = w->heads, .kv_heads = w->kv_heads, .dim = w->dim, .is_rounded = w->is_rounded, .eps = w->eps});
    if (rows < w->tokens) {
        gather(w->query, w->read, rows, w->heads * w->dim);
        gather(w->hidden, w->read, rows, w->size);
    }
    attention_work sight = *w->sights[index];
    sight.out = w->projected, sight.query = w->query, sight.keys = w->keys[index], sight.values = w->values[index];
    keepsight_attend(&sight);
    add_product(w, l->out, w->hidden, w->projected, l->after_attention, rows);
}

static void feed_forward(const decoder_work *w, const layer *l, long all_rows)
{
    for (long row = 0; row < all_rows; row += WIDE_ROWS) {
        const long rows = lesser(all_rows - row, WIDE_ROWS);
        float *hidden = w->hidden + row * w->size;
        norm(w, w->normed, hidden, l->before_feed_forward, 0, rows);
        multiply(l->gate, w->gate, w->normed, 0, rows);
        multiply(l->up, w->up, w->normed, w->gate, rows);
        add_product(w, l->down, hidden, w->up, l->after_feed_forward, rows);
    }
}

/* Of tokens whose angles and slots are known; keys and values are in those then. */
void keepsight_decode(const decoder_work *w)
{
    for (long index = w->first; index < w->end; index++) {
        const long rows = index == w->num_layers - 1 ? w->num_read : w->tokens;
        attend(w, w->layers + index, index, rows);
        feed_forward(w, w->layers + index, rows);
    }
}
