// Checks of attention, RoPE and the write into pages, which native_check.cpp runs.

#pragma once

namespace {

struct Case {
    int page_size, kv_heads, group, dim, value_dim, half, window;
    float softcap;
    bool shares_pages;
    std::vector<std::pair<int, int>> lens;  // new tokens, and those cached before

    std::string name() const {
        std::string text = "attention, pages of " + std::to_string(page_size);
        text += ", " + std::to_string(kv_heads) + " x " + std::to_string(group) + " heads of ";
        text += std::to_string(dim) + " and " + std::to_string(value_dim);
        text += ", half " + std::to_string(half) + ", window " + std::to_string(window);
        return text + ", softcap " + std::to_string(softcap);
    }
};

constexpr int SPARE = 3, NONE = INT32_MAX;

template <class T>
struct Trial {
    Case c;
    std::vector<std::vector<int32_t>> tables;
    std::vector<T> query, key, value, k_pages, v_pages;
    Pages stored{};  // in another format, in place of k_pages and v_pages
    std::vector<float> cos, sin;
    size_t q = 0, k = 0, v = 0, tokens = 0;  // elements of a token

    Trial(const Case& of, uint64_t seed) : c(of) {
        Random random(seed);
        q = c.kv_heads * c.group * c.dim, k = c.kv_heads * c.dim, v = c.kv_heads * c.value_dim;
        int shared = 0, pages = SPARE;
        for (auto [now, before] : c.lens) {
            tokens += now, pages += (now + before + c.page_size - 1) / c.page_size;
            if (c.shares_pages) shared = c.lens[0].second / c.page_size;
        }
        std::vector<int32_t> free(pages);
        for (int i = 0; i < pages; i++) free[i] = i;
        for (int i = pages - 1; i > 0; i--) std::swap(free[i], free[random.next() % (i + 1)]);
        for (auto [now, before] : c.lens) {
            auto& table = tables.emplace_back();
            for (int i = 0; i < (now + before + c.page_size - 1) / c.page_size; i++) {
                bool common = tables.size() > 1 && i < std::min(shared, before / c.page_size);
                table.push_back(common ? tables[0][i] : free.back());
                if (!common) free.pop_back();
            }
        }
        query = random.numbers<T>(tokens * q, 3), key = random.numbers<T>(tokens * k, 3);
        value = random.numbers<T>(tokens * v, 2);
        k_pages = random.numbers<T>(pages * c.page_size * k, 3);
        v_pages = random.numbers<T>(pages * c.page_size * v, 2);
        for (float angle : random.numbers<float>(tokens * c.half, 3))
            cos.push_back(std::cos(angle)), sin.push_back(std::sin(angle));
    }

    Heads heads() const {
        return {c.kv_heads * c.group, c.kv_heads, c.dim, c.value_dim, c.window, 0.3f / 2.0f,
                c.softcap};
    }

    // Queries [from, to) of sequences [begin, end), counted from each sequence's first new token
    // and cut off at its last, as a step of their own: the pages hold what came before.
    void run(int begin, int end, int from, int to, int threads, std::vector<T>& turned,
             std::vector<T>& out) {
        std::vector<int32_t> qo{0}, kv{0}, pages, lens;
        std::vector<int64_t> slots;
        std::vector<T> some_q, some_k, some_v;
        std::vector<float> some_cos, some_sin;
        std::vector<size_t> rows;
        auto take = [](auto& to, const auto& all, size_t row, size_t width) {
            to.insert(to.end(), all.begin() + row * width, all.begin() + (row + 1) * width);
        };
        size_t first = 0;
        for (int s = 0; s < begin; s++) first += c.lens[s].first;
        for (int s = begin; s < end; first += c.lens[s++].first) {
            auto [now, before] = c.lens[s];
            int last = std::min(to, now);
            if (from >= last) continue;
            for (int i = from; i < last; i++) {
                int at = before + i;
                slots.push_back((int64_t)tables[s][at / c.page_size] * c.page_size
                                + at % c.page_size);
                rows.push_back(first + i);
            }
            qo.push_back(qo.back() + last - from);
            lens.push_back(before + last);
            int count = (before + last + c.page_size - 1) / c.page_size;
            pages.insert(pages.end(), tables[s].begin(), tables[s].begin() + count);
            kv.push_back(pages.size());
        }
        for (size_t row : rows) {
            take(some_q, query, row, q), take(some_k, key, row, k), take(some_v, value, row, v);
            take(some_cos, cos, row, c.half), take(some_sin, sin, row, c.half);
        }
        std::vector<int32_t> firsts(lens.size());
        Batch batch{(int32_t)lens.size(), c.page_size, qo.data(),     kv.data(),
                    pages.data(),         lens.data(), firsts.data(), slots.data()};
        size_t wide = c.kv_heads * c.group * c.value_dim;
        auto format = sizeof(T) == 4 ? KVFormat::FLOAT32 : KVFormat::BFLOAT16;
        int64_t size = c.page_size * sizeof(T);
        Pages kept{(char*)k_pages.data(), (char*)v_pages.data(), size * (int64_t)k,
                   size * (int64_t)v, format};
        if (stored.k) kept = stored;
        std::vector<T> part(rows.size() * wide);
        Tokens<T> queries{some_q.data(), (int64_t)q}, keys{some_k.data(), (int64_t)k};
        Tokens<T> values{some_v.data(), (int64_t)v};
        write_kv(batch, heads(), queries, keys, values, Rope{some_cos.data(), some_sin.data(), c.half},
                 HeadNorms{}, kept, threads);
        Plan plan(batch, heads());
        Attention<T>{plan, queries, kept, part.data()}.run(threads);
        for (size_t i = 0; i < rows.size(); i++) {
            std::copy_n(&part[i * wide], wide, &out[rows[i] * wide]);
            std::copy_n(&some_q[i * q], q, &turned[rows[i] * q]);
        }
    }

    std::vector<double> rotated(const std::vector<T>& x, size_t row, int heads) const {
        std::vector<double> to;
        for (int h = 0; h < heads; h++)
            for (int d = 0; d < c.dim; d++) {
                const T* at = &x[(row * heads + h) * c.dim];
                int pair = d % std::max(c.half, 1);
                if (d >= 2 * c.half) {
                    to.push_back(number(at[d]));
                    continue;
                }
                double a = cos[row * c.half + pair], b = sin[row * c.half + pair];
                double x0 = number(at[pair]), x1 = number(at[pair + c.half]);
                to.push_back(d < c.half ? x0 * a - x1 * b : x1 * a + x0 * b);
            }
        return to;
    }

    // One query and head at a time, over the pages as `run` has left them.
    std::vector<double> naive(const std::vector<T>& turned) const {
        std::vector<double> out;
        int heads = c.kv_heads * c.group;
        size_t row = 0;
        for (size_t s = 0; s < c.lens.size(); s++)
            for (int i = 0; i < c.lens[s].first; i++, row++)
                for (int head = 0; head < heads; head++) {
                    int position = c.lens[s].second + i;
                    int first = c.window == NONE ? 0 : std::max(0, position - c.window + 1);
                    std::vector<double> weights, sums(c.value_dim);
                    double top = -INFINITY, total = 0;
                    auto slot = [&](int at) {
                        int64_t page = tables[s][at / c.page_size];
                        return (page * c.page_size + at % c.page_size) * c.kv_heads
                               + head / c.group;
                    };
                    for (int at = first; at <= position; at++) {
                        double score = 0;
                        for (int d = 0; d < c.dim; d++)
                            score += number(turned[row * q + head * c.dim + d])
                                     * number(k_pages[slot(at) * c.dim + d]);
                        score *= 0.3f / 2.0f;
                        if (c.softcap) score = std::tanh(score / c.softcap) * c.softcap;
                        weights.push_back(score), top = std::max(top, score);
                    }
                    for (double& weight : weights) total += weight = std::exp(weight - top);
                    for (int at = first; at <= position; at++)
                        for (int d = 0; d < c.value_dim; d++)
                            sums[d] += weights[at - first] / total
                                       * number(v_pages[slot(at) * c.value_dim + d]);
                    out.insert(out.end(), sums.begin(), sums.end());
                }
        return out;
    }
};

template <class T>
void check_attention(const Case& c, uint64_t seed) {
    std::string name = type<T>() + " " + c.name();
    const Trial<T> before(c, seed);
    int all = c.lens.size(), most = 0;
    for (auto [now, cached] : c.lens) most = std::max(most, now);
    size_t wide = c.kv_heads * c.group * c.value_dim;
    Trial<T> step = before;
    std::vector<T> turned(step.tokens * step.q), out(step.tokens * wide);
    step.run(0, all, 0, most, 1, turned, out);

    std::vector<double> queries, keys, values;
    std::vector<T> written_keys, written_values;
    size_t row = 0;
    for (int s = 0; s < all; s++)
        for (int i = 0; i < c.lens[s].first; i++, row++) {
            int at = c.lens[s].second + i;
            size_t slot = (size_t)step.tables[s][at / c.page_size] * c.page_size + at % c.page_size;
            auto some = before.rotated(before.query, row, c.kv_heads * c.group);
            queries.insert(queries.end(), some.begin(), some.end());
            some = before.rotated(before.key, row, c.kv_heads);
            keys.insert(keys.end(), some.begin(), some.end());
            for (size_t d = 0; d < step.k; d++)
                written_keys.push_back(step.k_pages[slot * step.k + d]);
            for (size_t d = 0; d < step.v; d++) {
                written_values.push_back(step.v_pages[slot * step.v + d]);
                values.push_back(number(before.value[row * step.v + d]));
            }
        }
    check_near(turned, queries, name + ": queries turned");
    check_near(written_keys, keys, name + ": keys turned and written");
    check_near(written_values, values, name + ": values written", 1e-12);
    check_near(out, step.naive(turned), name, sizeof(T) == 4 ? 1e-5 : 8e-3);

    // The same bits by any number of threads, in any chunks, and alone.
    for (int threads : THREADS)
        for (int chunk : {most, 7, 1}) {
            if (chunk == 1 && threads == 2) continue;  // as long as all others together
            bool alone = chunk == 1;
            Trial<T> again = before;
            std::vector<T> other_turned(turned.size()), other(out.size());
            for (int s = 0; s < (alone ? all : 1); s++)
                for (int from = 0; from < most; from += chunk)
                    again.run(alone ? s : 0, alone ? s + 1 : all, from, from + chunk, threads,
                              other_turned, other);
            bool equal = same(out, other) && same(turned, other_turned)
                         && same(step.k_pages, again.k_pages) && same(step.v_pages, again.v_pages);
            check(equal, name + ": " + std::to_string(threads) + " threads, chunks of "
                             + std::to_string(chunk));
        }
}

// Pages in another format give the bits of float32 pages with the numbers that they hold.
template <class S>
void check_pages(KVFormat format, double tolerance) {
    std::string name = "pages of format " + std::to_string((int)format);
    Case c{3, 2, 3, 64, 32, 0, 300, 6, true, {{1, 600}, {2, 640}, {9, 520}}};
    Trial<float> plain(c, 9);
    auto keep = [&](std::vector<float>& numbers, int dim) {
        std::vector<S> kept(numbers.size() / dim * stored<S>(dim));
        std::vector<double> expected(numbers.begin(), numbers.end());
        for (size_t head = 0; head < numbers.size() / dim; head++) {
            S* to = &kept[head * stored<S>(dim)];
            float* from = &numbers[head * dim];
            store_row(to, from, dim);
            for (int d = 0; d < dim; d += W) store(from + d, load_stored(to, d, dim - d));
        }
        check_near(numbers, expected, name, tolerance);
        return kept;
    };
    keep(plain.key, c.dim), keep(plain.value, c.value_dim);
    auto keys = keep(plain.k_pages, c.dim), values = keep(plain.v_pages, c.value_dim);
    Trial<float> other = plain;
    int64_t size = c.page_size * sizeof(S), width = c.kv_heads * stored<S>(c.dim);
    int64_t value_width = c.kv_heads * stored<S>(c.value_dim);
    other.stored = {(char*)keys.data(), (char*)values.data(), size * width, size * value_width,
                    format};
    std::vector<float> turned(plain.tokens * plain.q), out(plain.tokens * 6 * c.value_dim);
    std::vector<float> other_out(out.size());
    plain.run(0, 3, 0, 9, 2, turned, out), other.run(0, 3, 0, 9, 2, turned, other_out);
    check(same(out, other_out), name + ": the bits of float32 pages");
}

}  // namespace
