// The functions that Python calls, compiled for the machine at hand; callers check every argument.
// Each returns 1, or 0 if memory ran out, or -1 for a number that is out of range; but for `plan`.

#include "blocks.h"
#include "decode.h"
#include "merges.h"

namespace {

template <class F>
int32_t enough_memory(const F& f) try {
    f();
    return true;
} catch (const std::bad_alloc&) {
    return false;
}

template <class T>
int32_t attend(const Batch& batch, const Heads& heads, T* query, int64_t query_stride, T* key,
               int64_t key_stride, T* value, int64_t value_stride, const Pages& pages, T* out,
               const float* sinks, int threads) {
    return enough_memory([&] {
        Tokens<T> q{query, query_stride}, k{key, key_stride}, v{value, value_stride};
        write_kv(batch, heads, q, k, v, Rope{}, HeadNorms{}, pages, threads);
        Plan plan(batch, heads);
        Attention<T>{plan, q, pages, out, sinks}.run(threads);
    });
}

template <class T>
int32_t linear(const T* x, int64_t stride, const Weight& weight, T* out, int64_t rows, int threads) {
    return enough_memory([&] { multiply(x, stride, weight, out, weight.columns, rows, threads); });
}

template <class T>
int32_t rows(const Weight& weight, const int64_t* ids, int64_t count, T* out, int threads) {
    return enough_memory([&] { rows_of(weight, ids, count, out, threads); });
}

template <class T>
int32_t forward(const Model& model, const Batch& batch, const Batch& window, const Pages* pages,
                const States& states, const int64_t* ids, const int64_t* positions, const int64_t* wanted, int64_t count,
                float* logits, float* pooled_rows, int64_t pooled, const Images* images,
                int threads) {
    int64_t rows = batch.qo_indptr[batch.sequences];
    for (int64_t i = 0; i < rows; i++)
        if (ids[i] < 0 || ids[i] >= model.embedding.columns) return -1;
    for (int64_t i = 0; i < count; i++)
        if (wanted[i] < 0 || wanted[i] >= rows) return -1;
    return enough_memory([&] {
        Step<T> step{model, batch, window, pages, states, images, threads};
        step.run(ids, positions, wanted, count, logits, pooled_rows, pooled);
    });
}

template <class T>
int32_t decode_steps(const Model& model, const Batch& batch, const Batch& window, const Pages* pages,
                     Decode& of, int threads) {
    for (int64_t s = 0; s < batch.sequences; s++)
        if (of.ids[s * of.steps] < 0 || of.ids[s * of.steps] >= model.embedding.columns) return -1;
    return enough_memory([&] { decode<T>(model, batch, window, pages, of, threads); });
}

#define KERNELS(T)                                                                                 \
    (void*)attend<T>, (void*)linear<T>, (void*)rows<T>, (void*)forward<T>, (void*)decode_steps<T>

}  // namespace

extern "C" {
void* radixcache_float32[] = {KERNELS(float)};
void* radixcache_bfloat16[] = {KERNELS(bf16)};
int32_t radixcache_panel = N, radixcache_rounds_fast = ROUNDS_FAST;

int32_t radixcache_pack(const uint8_t* data, int64_t stride, int size, int64_t rows, int64_t depth,
                        uint32_t* panels, int threads) {
    return enough_memory([&] { pack_elements(data, stride, size, rows, depth, panels, threads); });
}

int32_t radixcache_pack_blocks(const uint8_t* numbers, const float* scales, const float* minimums,
                               int bits, int block, int64_t rows, int64_t depth, uint32_t* panels,
                               int threads) {
    return enough_memory([&] {
        pack_blocks(numbers, scales, minimums, bits, block, rows, depth, panels, threads);
    });
}

int32_t radixcache_pack_stored(const StoredRows* parts, int bits, int block, int head, int64_t rows,
                               int64_t depth, uint32_t* panels, int threads) {
    return enough_memory([&] {
        pack_stored(parts, bits, block, head, rows, depth, panels, threads);
    });
}

int32_t radixcache_find_merges(const char* text, const int64_t* characters, const double* scores,
                               int64_t pieces, int64_t count, int32_t* left, int32_t* right,
                               int64_t* found, int) {
    return enough_memory([&] {
        *found = find_merges(text, characters, scores, pieces, count, left, right);
    });
}

int64_t radixcache_plan(const Batch& batch, const int32_t* last_page_len, const int32_t* before,
                        const int32_t* write_indices, int64_t indices, int32_t* kv_lens,
                        int32_t* first, int64_t* slots) {
    return plan_batch(batch, last_page_len, before, write_indices, indices, kv_lens, first, slots);
}

int32_t radixcache_sample(const float* logits, int64_t stride, int64_t rows, int64_t vocab,
                          const Draw* draws, int64_t* tokens, float* highest, int threads) {
    return enough_memory([&] {
        sample(logits, stride, rows, vocab, draws, tokens, highest, threads);
    });
}
}
