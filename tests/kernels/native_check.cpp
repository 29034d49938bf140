// The kernels without Python: against loops in double precision, and a row's bits in any company.
//
//     c++ -std=c++17 -O3 -ffp-contract=off -pthread native_check.cpp -o check && ./check
//
// Compiled for another processor it runs under an emulator. The last line has a hash of all that the
// kernels gave: equal where vectors are equally wide. With the argument `wrong` one number of each
// comparison is changed, so that every one has to fail.

#include "../../kernels/native/native.cpp"

#include <cstdio>
#include <string>

#pragma GCC diagnostic ignored "-Wunused-function"

namespace {

const int THREADS[] = {1, 2, 3};

bool wrong = false;
int passed = 0, failed = 0;
uint64_t hash = 14695981039346656037u;

void check(bool good, const std::string& what) {
    (good ? passed : failed)++;
    if (!good) printf("failed: %s\n", what.c_str());
}

// ---- Numbers.

void set(float& to, float x) { to = x; }

void set(bf16& to, float x) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    to.bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// The same numbers on every machine: 32 bits of xorshift64*, between -most and most.
struct Random {
    uint64_t state;

    explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 1) {}

    uint32_t next() {
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return state * 0x2545f4914f6cdd1du >> 32;
    }

    template <class T>
    std::vector<T> numbers(size_t count, float most) {
        std::vector<T> all(count);
        for (T& x : all) set(x, most * ((int32_t)(next() >> 8) - (1 << 23)) / (1 << 23));
        return all;
    }
};

template <class T>
void add_to_hash(const std::vector<T>& v) {
    auto bytes = (const unsigned char*)v.data();
    for (size_t i = 0; i < v.size() * sizeof(T); i++) hash = (hash ^ bytes[i]) * 1099511628211u;
}

template <class T>
bool same(const std::vector<T>& a, std::vector<T> b) {  // signs of zeros and all
    if (wrong) ((unsigned char*)b.data())[b.size() / 2 * sizeof(T)] ^= 1;
    return !memcmp(a.data(), b.data(), a.size() * sizeof(T));
}

// The tolerance is of the largest number there.
template <class T>
void check_near(const std::vector<T>& got, std::vector<double> expected, const std::string& what,
                double tolerance = sizeof(T) == 4 ? 2e-6 : 8e-3) {
    double most = 0, off = 0;
    for (double x : expected) most = std::max(most, std::fabs(x));
    if (wrong) expected[expected.size() / 2] += most / 50;
    for (size_t i = 0; i < got.size(); i++) {
        double difference = std::fabs(number(got[i]) - expected[i]) / most;
        off = difference <= off ? off : difference;  // what is no number, too
    }
    check(off < tolerance, what + ": off by " + std::to_string(off * 1e6) + " millionths");
    add_to_hash(got);
}

template <class T>
std::string type() {
    return sizeof(T) == 4 ? "float32" : "bfloat16";
}

// ---- Attention, RoPE and the write into pages.

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

// ---- Row by row.

// A block's result normed or not, added to the residual, and the sum normed.
template <class T>
void check_joints(int rows, int width, bool centred, bool after) {
    std::string name = type<T>() + " join of " + std::to_string(width);
    if (centred) name += ", centred";
    if (after) name += ", normed before it is added";
    Random random(width);
    const auto result = random.numbers<float>(rows * width, 3);
    const auto residual = random.numbers<float>(rows * width, 3);
    const auto weight = random.numbers<float>(width, 1);
    const Joint joint{after ? weight.data() : nullptr, weight.data(), 0.7f, 1.5f, false};
    auto run = [&](int step, int threads, std::vector<float>& sum, std::vector<T>& out) {
        auto y = result;
        for (int r = 0; r < rows; r += step)
            join(&y[r * width], &sum[r * width], &out[r * width], step, width, joint, 1e-3f, centred,
                 threads);
    };
    auto normed = [&](const double* row, double* to) {
        double mean = 0, squares = 0;
        for (int d = 0; d < width && centred; d++) mean += row[d] / width;
        for (int d = 0; d < width; d++) squares += (row[d] - mean) * (row[d] - mean);
        double factor = 1 / std::sqrt(squares / width + (double)1e-3f);
        for (int d = 0; d < width; d++) to[d] = (row[d] - mean) * factor * weight[d];
    };
    auto sum = residual;
    std::vector<T> out(rows * width);
    run(rows, 1, sum, out);
    std::vector<double> y(result.begin(), result.end()), expected(rows * width);
    for (int r = 0; r < rows && after; r++) normed(&y[r * width], &y[r * width]);
    for (int i = 0; i < rows * width; i++) y[i] = ((double)0.7f * y[i] + residual[i]) * 1.5;
    check_near(sum, y, name + ", residual", 1e-5);
    std::vector<double> sums(sum.begin(), sum.end());
    for (int r = 0; r < rows; r++) normed(&sums[r * width], &expected[r * width]);
    check_near(out, expected, name, sizeof(T) == 4 ? 1e-5 : 8e-3);
    for (int threads : THREADS)
        for (int step : {rows, 1}) {
            auto other_sum = residual;
            std::vector<T> other(out.size());
            run(step, threads, other_sum, other);
            check(same(out, other) && same(sum, other_sum),
                  name + " by " + std::to_string(threads) + " threads, rows at once "
                      + std::to_string(step));
        }
}

double activation(Activation kind, double x, double u) {
    double z = 2 * std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
    if (kind == GELU) return x * std::erfc(-x / std::sqrt(2.0)) / 2 * u;
    if (kind == RELU2) return x > 0 ? x * x * u : 0;
    if (kind != CLAMPED) return x / (1 + std::exp(-(kind == GELU_TANH ? z : x))) * u;
    x = std::min(x, 7.0), u = std::clamp(u, -7.0, 7.0);
    return x / (1 + std::exp(-1.702 * x)) * (u + 1);
}

template <class T>
void check_gates(int rows, int width) {
    std::string name = type<T>() + " gated of " + std::to_string(width);
    for (Activation kind : {SILU, GELU_TANH, GELU, RELU2, CLAMPED}) {
        Random random(width);
        const auto both = random.numbers<T>(rows * 2 * width, 8);  // gate and up, as one product
        auto run = [&](int begin, int end, int threads, std::vector<T>& out) {
            const T* from = &both[begin * 2 * width];
            gated<T>(from, from + width, &out[begin * width], end - begin, width, 2 * width,
                     2 * width, kind, threads);
        };
        std::vector<T> out(rows * width);
        run(0, rows, 1, out);
        std::vector<double> expected;
        for (int r = 0; r < rows; r++)
            for (int d = 0; d < width; d++) {
                double x = number(both[r * 2 * width + d]);
                double y = number(both[r * 2 * width + width + d]);
                expected.push_back(activation(kind, x, y));
            }
        check_near(out, expected, name + ", activation " + std::to_string(kind));
        for (int threads : THREADS)
            for (int step : {rows, 1}) {
                std::vector<T> other(out.size());
                for (int r = 0; r < rows; r += step) run(r, r + step, threads, other);
                check(same(out, other),
                      name + " by " + std::to_string(threads) + " threads, rows at once "
                          + std::to_string(step));
            }
    }
}

// ---- Products.

// A weight [columns][depth] in panels, and the numbers that it stands for.
struct Packed {
    std::vector<uint32_t> panels;
    std::vector<float> bias, numbers, scales;
    std::vector<uint8_t> stored;  // numbers of the format, or bytes of floats
    Weight weight;

    Packed(Format format, int columns, int depth) {
        Random random(columns * depth + format);
        int bits = format == FLOAT32 ? 32 : format == BFLOAT16 ? 16 : format >= BITS4 ? 4 : 8;
        int block = format == BITS8_OF_16 ? 16 : 32, count = (columns + N - 1) / N;
        int per = 32 / bits, padded = bits < 16 ? depth : (depth + per - 1) / per * per;
        panels.resize((size_t)count * N * (bits < 16 ? depth / block * (2 + block / per) : padded / per));
        bias = random.numbers<float>(count * N, 1);
        if (bits < 16) {
            stored.resize(columns * depth);
            for (auto& x : stored) x = random.next() >> 24 & ((1 << bits) - 1);
            std::vector<float> minimums;  // of few bits, as in files: products are exact
            for (bf16 x : random.numbers<bf16>(columns * depth / block, 0.01f))
                scales.push_back(number(x)), minimums.push_back(-8 * number(x));
            const float floats[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
            for (size_t i = 0; i < stored.size(); i++) {
                float x = format == BITS4_E2M1 ? floats[stored[i]] : (float)stored[i];
                numbers.push_back(std::fma(x, scales[i / block], minimums[i / block]));
            }
            pack_blocks(stored.data(), scales.data(), minimums.data(), bits, block, columns, depth,
                        panels.data(), 2);
            if (format == BITS4_E2M1)
                for (auto& code : stored) code = floats[code];
        } else if (bits == 16) {
            auto stored = random.numbers<bf16>(columns * depth, 0.1f);
            for (bf16 x : stored) numbers.push_back(number(x));
            pack_elements((uint8_t*)stored.data(), 2 * depth, 2, columns, depth, panels.data(), 2);
        } else {
            numbers = random.numbers<float>(columns * depth, 0.1f);
            pack_elements((uint8_t*)numbers.data(), 4 * depth, 4, columns, depth, panels.data(), 2);
        }
        weight = {panels.data(), bias.data(), depth, padded, columns, format};
    }
};

// That products of rows `x` have the bits of `expected`, so many at once, by any threads.
template <class T>
void check_in_any_company(const std::vector<T>& x, const std::vector<T>& expected,
                          const Weight& weight, int columns, int depth,
                          std::initializer_list<int> steps, const std::string& name) {
    int rows = expected.size() / columns;
    for (int threads : THREADS)
        for (int step : steps) {
            std::vector<T> other(expected.size());
            for (int r = 0; r < rows; r += step)
                multiply(&x[r * depth], depth, weight, &other[r * columns], columns,
                         std::min(step, rows - r), threads);
            check(same(expected, other), name + " by " + std::to_string(threads)
                                             + " threads, rows at once " + std::to_string(step));
        }
}

template <class T>
void check_products(Format format, int columns, int depth) {
    std::string name = type<T>() + " times format " + std::to_string(format) + " of "
                       + std::to_string(columns) + " x " + std::to_string(depth);
    const int rows = 101;
    Packed packed(format, columns, depth);
    const auto x = Random(depth).numbers<T>(rows * depth, 3);
    std::vector<T> out(rows * columns);
    multiply(x.data(), depth, packed.weight, out.data(), columns, rows, 1);
    std::vector<double> expected;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            double sum = packed.bias[c];
            for (int k = 0; k < depth; k++)
                sum += (double)number(x[r * depth + k]) * packed.numbers[c * depth + k];
            expected.push_back(sum);
        }
    check_near(out, expected, name, sizeof(T) == 4 ? 1e-5 : 8e-3);
    check_in_any_company(x, out, packed.weight, columns, depth,
                         {rows, 50, 13, 12, 9, 8, 7, 6, 5, 4, 3, 2, 1}, name);
    std::vector<int64_t> ids;
    std::vector<float> taken(columns * depth);
    for (int c = 0; c < columns; c++) ids.push_back(c);
    rows_of(packed.weight, ids.data(), columns, taken.data(), 3);
    check(same(packed.numbers, taken), name + ": rows of the weight");
}

}  // namespace

#include "rounded_check.h"

namespace {

template <class T>
void check_all() {
    uint64_t seed = 0;
    for (const Case& c : std::vector<Case>{
             // pages, KV heads x group, dim, of values, half of RoPE, window, softcap, shared pages
             {16, 2, 4, 64, 64, 32, NONE, 0, false, {{1, 20}, {9, 30}, {70, 5}}},
             {1, 2, 1, 16, 16, 8, NONE, 0, false, {{90, 0}, {1, 300}, {2, 33}}},
             {3, 1, 7, 40, 40, 12, 40, 0, false, {{40, 100}, {1, 270}}},
             {16, 2, 3, 8, 8, 0, 1, 6, false, {{9, 20}, {1, 0}}},
             {16, 2, 3, 48, 20, 24, 300, 6, true, {{1, 600}, {2, 640}, {9, 520}}},
             {64, 1, 4, 80, 80, 40, NONE, 6, true, {{1, 260}, {1, 256}, {60, 400}}},
             {3, 2, 1, 33, 33, 16, 17, 0, false, {{300, 0}, {1, 511}, {1, 512}}},
         })
        check_attention<T>(c, ++seed);
    for (int width : {1, 7, 16, 60, 100, 1536}) {
        for (bool centred : {false, true})  // a single number, centred, is 0
            for (bool after : {false, true})
                if (width > 1 || !centred) check_joints<T>(50, width, centred, after);
        check_gates<T>(50, width);
    }
    for (int format = FLOAT32; format <= BITS4_E2M1; format++) {
        check_products<T>((Format)format, 33, 576), check_products<T>((Format)format, 100, 96);
        if (format <= BFLOAT16) check_products<T>((Format)format, 50, 77);
        else check_rounded_products<T>((Format)format, 33, 576);
        if (format > BFLOAT16) check_rounded_products<T>((Format)format, 100, 96);
    }
}

}  // namespace

int main(int count, char** arguments) {
    wrong = count > 1 && !strcmp(arguments[1], "wrong");
    check_all<float>();
    check_all<bf16>();
    check_pages<bf16>(KVFormat::BFLOAT16, 4e-3), check_pages<fp16>(KVFormat::FLOAT16, 5e-4);
    check_pages<q8>(KVFormat::INT8, 5e-3);
    printf("%d passed, %d failed, vectors of %d, hash %016llx\n", passed, failed, W,
           (unsigned long long)hash);
    return failed > 0;
}
