// Several steps of sequences that decode in one call (multi-step scheduling, as in vLLM 0.6): Python
// between two steps runs on caches that the weights have wiped.

#pragma once

#include "model.h"
#include "sampling.h"

namespace {

// Token i of sequence s stands at s * steps + i of the arrays.
struct Decode {
    const int64_t *ids, *positions;  // of the ids, the first of each sequence is read
    const Draw* draws;
    const int64_t* stops;      // tokens behind which no step follows
    const int32_t* interrupt;  // nor does one while this is not 0
    int64_t* tokens;
    float *highest, *logits;   // each row's highest logit; [sequences][vocab]
    int64_t steps, stop_count, done;  // done: the steps that were run
};

// The tables of one step: each sequence has one new token of those that `all` has.
struct OneStep {
    std::vector<int32_t> starts, lens;
    std::vector<int64_t> slots;
    Batch batch;

    OneStep(const Batch& all, int64_t steps, int64_t step) : batch(all) {
        for (int s = 0; s < all.sequences; s++) {
            starts.push_back(s);
            lens.push_back(all.kv_lens[s] - steps + 1 + step);
            slots.push_back(all.slots[s * steps + step]);
        }
        starts.push_back(all.sequences);
        batch.qo_indptr = starts.data(), batch.kv_lens = lens.data();
        batch.slots = slots.data(), batch.ahead = nullptr;
    }
};

template <class T>
void decode(const Model& model, const Batch& all, const Batch& window, const Pages* pages,
            Decode& of, int threads) {
    int64_t count = all.sequences, vocab = model.head.columns;
    std::vector<int64_t> ids(count), positions(count), rows(count);
    for (int64_t s = 0; s < count; s++) ids[s] = of.ids[s * of.steps], rows[s] = s;
    States none{};
    bool ends = false;
    for (of.done = 0; of.done < of.steps && !ends; of.done++) {
        OneStep full(all, of.steps, of.done), windowed(window, of.steps, of.done);
        for (int64_t s = 0; s < count; s++) positions[s] = of.positions[s * of.steps + of.done];
        Step<T> step{model, full.batch, windowed.batch, pages, none, nullptr, threads};
        step.run(ids.data(), positions.data(), rows.data(), count, of.logits, nullptr, 0);
        parallel(count, threads, [&](int64_t s) {
            int64_t at = s * of.steps + of.done;
            Sampler row{of.logits + s * vocab, vocab};
            of.tokens[at] = row.draw(of.draws[at], of.highest + at);
        });
        ends = __atomic_load_n(of.interrupt, __ATOMIC_RELAXED);
        for (int64_t s = 0; s < count; s++) {
            int64_t at = s * of.steps + of.done, token = ids[s] = of.tokens[at];
            ends |= !std::isfinite(of.highest[at]) || token >= model.embedding.columns;
            ends |= std::count(of.stops, of.stops + of.stop_count, token) > 0;
        }
    }
}

}  // namespace
