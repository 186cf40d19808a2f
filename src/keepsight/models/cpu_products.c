/* Matrix products on a CPU: rows of float32 by a weight of float32 or bfloat16, or of int8 with a scale for each output.
 *
 * Each number of the result is summed separately and always in the same order, whatever the number of rows, the other rows
 * and the number of threads. So a token has the same results to the last bit alone and in a batch, with its whole prompt
 * and after a cached prefix.
 *
 * A weight is laid out once in panels of as many outputs as two vectors have lanes; the sums of some rows by one panel stay
 * in registers, of vectors or tiles, while the inputs are processed.
 */

#include "cpu_activations.h"
#include "cpu_products.h"

#if defined(__AMX_BF16__)
#include "cpu_product_tiles.h"
#else
#include "cpu_product_vectors.h"
#endif

/* If the inputs of the rows are no larger than this, all of them fit a core's cache. */
#define FEW_BYTES (512 * 1024)
/* Multiplying this many strips by a panel takes as long as reading the panel from memory. */
#define STRIPS_OF_A_READ 4
/* Fewer multiplications are finished before a second thread has started. */
#define PRODUCTS_WORTH_A_TEAM (1 << 20)

/* Read by the caller, which lays out weights. */
const long keepsight_panel = PANEL;

/* Whether pairs of bfloat16 can be multiplied; whether many of them are multiplied faster than float32; and whether the
 * processor and the operating system can run this build. */
long keepsight_multiplies_bfloat16, keepsight_gains_by_rounding, keepsight_runs_here = 1;

__attribute__((constructor)) static void ask_processor(void)
{
#if defined(__AVX512BF16__)
    keepsight_multiplies_bfloat16 = __builtin_cpu_supports("avx512bf16") != 0;
    /* Intel's vectors need four times as long for pairs as for float32, AMD's as long. */
    keepsight_gains_by_rounding = keepsight_multiplies_bfloat16 && __builtin_cpu_is("amd") != 0;
#endif
#if defined(__AMX_BF16__)
    keepsight_runs_here = keepsight_multiplies_bfloat16 && may_use_tiles();
    keepsight_gains_by_rounding = keepsight_runs_here;
#endif
}

/* All blocks of inputs have the same size, except the last. */
INLINE long inputs_of_block(long inputs, arithmetic kind)
{
    const long at_once = inputs_at_once(kind), steps = parts_of(inputs, at_once);
    return parts_of(steps, parts_of(steps, most_inputs_of_block(kind) / at_once)) * at_once;
}

/* The product of some rows by some panels. */
typedef struct {
    long first_row, rows, first_panel, end_panel;
} patch;

/* The product of some rows by one panel: its place in `out`, and how many of the panel's columns are real outputs. */
typedef struct {
    float *out;
    long rows, outputs, panel;
} piece;

INLINE piece piece_of(const product_work *w, long first_row, long rows, long panel)
{
    return (piece){
        .out = w->out + first_row * w->outputs + panel * PANEL,
        .rows = rows,
        .outputs = lesser(w->outputs - panel * PANEL, PANEL),
        .panel = panel,
    };
}

/* Copy outputs of one row; usually a whole panel's, whose constant size needs no call. */
INLINE void copy_outputs(float *to, const float *from, long count)
{
    if (count == PANEL)
        memcpy(to, from, PANEL * sizeof *to);
    else
        memcpy(to, from, count * sizeof *to);
}

/* Load the initial sums [rows, PANEL]: those so far, with the bias added in the first block. */
INLINE void take_sums(const product_work *w, piece p, int is_first, float *sums)
{
    const float *bias = is_first && w->bias ? w->bias + p.panel * PANEL : 0;
    for (long row = 0; row < p.rows; row++, sums += PANEL) {
        if (is_first && !w->is_onto)
            memcpy(sums, bias, PANEL * sizeof *sums);
        else
            copy_outputs(sums, p.out + row * w->outputs, p.outputs);
        if (bias && w->is_onto)
            for (long i = 0; i < PANEL; i++)
                sums[i] += bias[i];
    }
}

/* Apply the activation and `times`, after all inputs. */
INLINE void finish_sums(const product_work *w, piece p, float *sums)
{
    activate(w->activation, sums, p.rows * PANEL);
    if (w->times)
        for (long row = 0; row < p.rows; row++) {
            float times[PANEL] = {};
            copy_outputs(times, w->times + (p.out - w->out) + row * w->outputs, p.outputs);
            for (long i = 0; i < PANEL; i++)
                sums[row * PANEL + i] *= times[i];
        }
}

/* For int8, after a block's inputs: scale the sums and add those of the blocks before. */
INLINE void scale_sums(const product_work *w, piece p, int is_first, float *sums)
{
    const float *scales = w->scales + p.panel * PANEL;
    piece row = p;
    row.rows = 1;
    for (; p.rows; p.rows--, row.out += w->outputs, sums += PANEL) {
        float before[PANEL] = {};
        if (!is_first || w->is_onto || w->bias)
            take_sums(w, row, is_first, before);
        for (long i = 0; i < PANEL; i++)
            sums[i] = sums[i] * scales[i] + before[i];
    }
}

INLINE void give_sums(const product_work *w, piece p, const float *sums)
{
    for (long row = 0; row < p.rows; row++)
        copy_outputs(p.out + row * w->outputs, sums + row * PANEL, p.outputs);
}

/* The order in which a patch is computed: for a group of panels one block of inputs after another, and within a panel's
 * block one stretch after another. */
typedef struct {
    long inputs, blocks, panels_at_once, inputs_at_hand;
} order;

typedef struct {
    long panel, block, input; /* `input`: the first one of the stretch, within the block */
} turn;

INLINE long inputs_left(const product_work *w, order o, turn t)
{
    return lesser(o.inputs, w->inputs - t.block * o.inputs) - t.input;
}

INLINE turn turn_after(const product_work *w, patch p, order o, turn t)
{
    const long group = p.first_panel + (t.panel - p.first_panel) / o.panels_at_once * o.panels_at_once;
    if (inputs_left(w, o, t) > o.inputs_at_hand)
        return (turn){t.panel, t.block, t.input + o.inputs_at_hand};
    if (t.panel + 1 < lesser(group + o.panels_at_once, p.end_panel))
        return (turn){t.panel + 1, t.block, 0};
    return t.block + 1 < o.blocks ? (turn){group, t.block + 1, 0} : (turn){t.panel + 1, 0, 0};
}

INLINE stretch stretch_of(const product_work *w, patch p, order o, turn t, const arithmetic kind)
{
    const long step = inputs_of_step(kind), first = t.block * o.inputs + t.input;
    if (t.panel == p.end_panel)
        return (stretch){};
    return (stretch){
        (const char *)w->weight + (t.panel * parts_of(w->inputs, step) + first / step) * BYTES_OF_STEP,
        lesser(inputs_left(w, o, t), o.inputs_at_hand),
    };
}

/* Add the products with a stretch of a panel to a patch's results; `prepared`: the patch's rows, laid out for the block. */
INLINE void multiply_turn(
    const product_work *w, patch p, order o, turn t, stretch weight, const char *prepared, product_room *room,
    const arithmetic kind)
{
    const long inputs = inputs_left(w, o, (turn){t.panel, t.block, 0});
    const int is_first = !t.block, is_scaled = is_of_int8(kind);
    const int begins_anew = is_scaled || (is_first && !w->is_onto && !w->bias);
    const int is_last = t.input + weight.inputs == inputs;
    const int is_finished = is_last && t.block + 1 == o.blocks && (w->activation || w->times);
    const long strips = parts_of(p.rows, MOST_ROWS);
    for (long index = 0; index < strips; index++) {
        const strip s = strip_of(p.rows, index);
        const char *its = prepared + bytes_of_rows(s.first, inputs, kind) + bytes_of_rows(s.places, t.input, kind);
        const piece all = piece_of(w, p.first_row + s.first, s.rows, t.panel);
        float *sums = room->sums + s.first * PANEL;
        if (!t.input && !begins_anew)
            take_sums(w, all, is_first, sums);
        /* Otherwise results go through the room's buffer, which takes a tenth of the time. */
        const int is_whole = all.outputs == PANEL && s.rows == s.places && !is_finished && !is_scaled;
        places_of_sums to = {sums, PANEL};
        if (is_last && is_whole)
            to = (places_of_sums){all.out, w->outputs};
        /* The sums of a single strip stay in registers until all inputs of the block are processed. */
        if (strips == 1 && !is_last)
            to.first = 0;
        multiply_rows(
            to, strips == 1 && t.input ? 0 : sums, its, s.places, weight, begins_anew && !t.input, !index, room, kind);
        if (is_last && is_scaled)
            scale_sums(w, all, is_first, sums);
        if (is_finished)
            finish_sums(w, all, sums);
        if (is_last && !is_whole)
            give_sums(w, all, sums);
    }
}

INLINE void take_block(const product_work *w, patch p, long first, char *prepared, const arithmetic kind)
{
    const long inputs = lesser(inputs_of_block(w->inputs, kind), w->inputs - first);
    for (long index = 0; index < parts_of(p.rows, MOST_ROWS); index++) {
        const strip s = strip_of(p.rows, index);
        const float *hidden = w->hidden + (p.first_row + s.first) * w->inputs + first;
        take_inputs(prepared + bytes_of_rows(s.first, inputs, kind), s.places, hidden, w->inputs, s.rows, inputs, kind);
    }
}

INLINE void multiply_patch(const product_work *w, patch p, const arithmetic kind)
{
    const long inputs = inputs_of_block(w->inputs, kind), blocks = parts_of(w->inputs, inputs);
    const long strips = parts_of(p.rows, MOST_ROWS), panels = p.end_panel - p.first_panel;
    const strip last = strip_of(p.rows, strips - 1);
    const long bytes = bytes_of_rows(last.first + last.places, inputs, kind);
    const order o = {
        .inputs = inputs,
        .blocks = blocks,
        .panels_at_once = blocks * bytes <= FEW_BYTES ? 1 : lesser(panels, PANELS_AT_ONCE),
        .inputs_at_hand = lesser(inputs, inputs_at_hand(strips, kind)),
    };
    /* If all panels are computed before the next block, each block of inputs overwrites the one before. */
    const long step = o.panels_at_once < panels ? bytes : 0;
    char *prepared = room_for(step ? blocks * bytes : bytes);
    if (!prepared)
        return;
    product_room room;
    enter(&room, p.rows);
    for (turn t = {p.first_panel, 0, 0}, next; t.panel < p.end_panel; t = next) {
        const stretch weight = stretch_of(w, p, o, t, kind);
        next = turn_after(w, p, o, t);
        if (t.panel == p.first_panel && !t.input)
            take_block(w, p, t.block * inputs, prepared + t.block * step, kind);
        take_stretch(&room, weight, stretch_of(w, p, o, next, kind), kind);
        multiply_turn(w, p, o, t, weight, prepared + t.block * step, &room, kind);
    }
    leave(&room);
    free(prepared);
}

/* The cost of a part: products, or reading the weight from memory; ties are broken by rows, which must be laid out. */
INLINE long cost_of_part(long rows, long panels)
{
    const long strips = parts_of(rows, MOST_ROWS);
    return (strips > STRIPS_OF_A_READ ? strips : STRIPS_OF_A_READ) * panels * INT32_MAX + rows;
}

/* Return into how many parts rows are cut, when each part has some rows and some panels: the choice of least cost. */
INLINE long parts_of_rows(long rows, long panels, long parts)
{
    long best = 1, least = INT64_MAX;
    for (long each = 1; each <= parts; each++) {
        const long cost = cost_of_part(parts_of(rows, each), parts_of(panels, parts / each));
        if (parts % each == 0 && cost < least)
            best = each, least = cost;
    }
    return best;
}

INLINE void multiply_share(const product_work *w, long part, long parts, const arithmetic kind)
{
    const long panels = parts_of(w->outputs, PANEL), of_rows = parts_of_rows(w->rows, panels, parts);
    const long of_panels = parts / of_rows, end_row = w->rows * (part / of_panels + 1) / of_rows;
    patch p = {
        .first_row = w->rows * (part / of_panels) / of_rows,
        .first_panel = panels * (part % of_panels) / of_panels,
        .end_panel = panels * (part % of_panels + 1) / of_panels,
    };
    for (; p.first_row < end_row; p.first_row += p.rows) {
        const long left = end_row - p.first_row;
        p.rows = parts_of(left, parts_of(left, ROWS_AT_ONCE));
        multiply_patch(w, p, kind);
    }
}

static void product_part(const void *shared, long part, long parts)
{
    const product_work *w = shared;
    if (w->kind == FLOAT32)
        multiply_share(w, part, parts, FLOAT32);
    else if (w->kind == BFLOAT16)
        multiply_share(w, part, parts, BFLOAT16);
    else if (w->kind == BFLOAT16_BY_SAME)
        multiply_share(w, part, parts, BFLOAT16_BY_SAME);
    else if (w->kind == INT8)
        multiply_share(w, part, parts, INT8);
    else
        multiply_share(w, part, parts, INT8_BY_BFLOAT16);
}

void keepsight_multiply(const product_work *w)
{
    share(product_part, w, w->rows * w->inputs * w->outputs < PRODUCTS_WORTH_A_TEAM ? 1 : INT32_MAX);
}

/* Rows ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    float *out;           /* [count, inputs] */
    const void *weight;   /* laid out as a product's, as are the scales */
    const float *scales;
    const int64_t *which; /* [count] */
    long count, inputs, kind;
} rows_work;

static void rows_part(const void *shared, long part, long parts)
{
    const rows_work *w = shared;
    const long step = inputs_of_step(w->kind), steps = parts_of(w->inputs, step);
    for (long index = w->count * part / parts; index < w->count * (part + 1) / parts; index++) {
        const long at = w->which[index] / PANEL * steps * PANEL + w->which[index] % PANEL;
        float *out = w->out + index * w->inputs;
        for (long i = 0; i < w->inputs; i++) {
            const long number = (at + i / step * PANEL) * step + i % step;
            if (w->kind == FLOAT32)
                out[i] = ((const float *)w->weight)[number];
            else if (is_of_int8(w->kind))
                out[i] = ((const int8_t *)w->weight)[number] * w->scales[w->which[index]];
            else
                out[i] = widened(((const uint16_t *)w->weight)[number]);
        }
    }
}

/* Read the rows of some outputs from a weight in panels, for example token embeddings. */
void keepsight_take_rows(const rows_work *w)
{
    share(rows_part, w, parts_for(w->count * w->inputs));
}
