// The kernels without Python: against loops in double precision, and a row's bits in any company.
//
//     c++ -std=c++17 -O3 -ffp-contract=off -pthread native_check.cpp -o check && ./check
//
// Compiled for another processor it runs under an emulator. The last line has a hash of all that the
// kernels gave: equal where vectors are equally wide. With the argument `wrong` one number of each
// comparison is changed, so that every one has to fail.

#include "../../../kernels/native/native.cpp"

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

}  // namespace

#include "attention_check.h"

namespace {

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
            add_norm(&y[r * width], &sum[r * width], &out[r * width], step, width, joint, 1e-3f,
                     centred, threads);
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
        auto both = random.numbers<T>(rows * 2 * width, 8);  // gate and up, as one product
        set(both[0], -1e30f), set(both[1 % width], -90.0f);
        auto run = [&](int begin, int end, int threads, std::vector<T>& out) {
            const T* from = &both[begin * 2 * width];
            activation<T>(from, from + width, &out[begin * width], end - begin, width, 2 * width,
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
    static bool has_levels(Format format) { return format >= INTS8; }
    static int block_of(Format format) {
        return format == BITS4_OF_16 || format == INTS8_OF_16 || format == LEVELS4_OF_16 ? 16 : 32;
    }

    std::vector<uint32_t> panels;
    std::vector<float> bias, numbers, scales;
    std::vector<uint8_t> stored;  // numbers of the format
    std::vector<int> whole;       // the same, or levels
    Levels levels;
    Weight weight;

    Packed(Format format, int columns, int depth) {
        Random random(columns * depth + format);
        bool bytes = format == BITS8 || format == INTS8 || format == INTS8_OF_16 || format == FLOATS8;
        int bits = format == FLOAT32 ? 32 : format == BFLOAT16 ? 16 : bytes ? 8 : 4;
        int block = block_of(format), count = (columns + N - 1) / N, head = 2 - has_levels(format);
        int per = 32 / bits, padded = bits < 16 ? depth : (depth + per - 1) / per * per;
        panels.resize((size_t)count * N
                      * (bits < 16 ? depth / block * head + depth / per : padded / per));
        levels.narrow = format == LEVELS4_OF_16;
        for (int i = 0; i < 16; i++) {
            levels.bytes[i] = levels.narrow ? 2 * i - 16 : 17 * i - 128;
            levels.floats[i] = levels.bytes[i];
            levels.moved[i] = levels.bytes[i] + (levels.narrow ? 16 : 128);
        }
        bias = random.numbers<float>(count * N, 1);
        if (bits < 16) {
            stored.resize(columns * depth);
            for (auto& x : stored) x = random.next() >> 24 & ((1 << bits) - 1);
            std::vector<float> minimums;  // of few bits, as in files: products are exact
            for (bf16 x : random.numbers<bf16>(columns * depth / block, 0.01f))
                scales.push_back(number(x)), minimums.push_back(-8 * number(x));
            for (size_t i = 0; i < stored.size(); i++) {
                if (format == FLOATS8) stored[i] &= 0xf7;  // no NaN
                int level = format < INTS8 ? stored[i] : levels.bytes[stored[i] & 15];
                if (format == INTS4) level = stored[i] - stored[i] / 8 * 16;
                if (format == INTS8 || format == INTS8_OF_16) level = (int8_t)stored[i];
                whole.push_back(level);
                int part = stored[i] & 7, power = stored[i] >> 3 & 15;
                float x = std::ldexp(power ? 8 + part : part, std::max(power, 1) - 10);
                if (format != FLOATS8) x = whole[i];
                else if (stored[i] & 128) x = -x;
                numbers.push_back(x * scales[i / block]);
                if (!has_levels(format)) numbers[i] += minimums[i / block];
            }
            pack_blocks(stored.data(), scales.data(), head == 2 ? minimums.data() : nullptr, bits,
                        block, columns, depth, panels.data(), 2);
        } else if (bits == 16) {
            auto stored = random.numbers<bf16>(columns * depth, 0.1f);
            for (bf16 x : stored) numbers.push_back(number(x));
            pack_elements((uint8_t*)stored.data(), 2 * depth, 2, columns, depth, panels.data(), 2);
        } else {
            numbers = random.numbers<float>(columns * depth, 0.1f);
            pack_elements((uint8_t*)numbers.data(), 4 * depth, 4, columns, depth, panels.data(), 2);
        }
        weight = {panels.data(), bias.data(), depth, padded, columns, format, nullptr, &levels};
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
    Upcoming whole = panels_of(packed.weight, 2);
    check((whole.count * whole.size == (int64_t)packed.panels.size() * 4) != wrong,
          name + ": what the product reads");
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
    for (int format = FLOAT32; format <= FLOATS8; format++) {
        check_products<T>((Format)format, 33, 576), check_products<T>((Format)format, 100, 96);
        if (format <= BFLOAT16) check_products<T>((Format)format, 50, 77);
        else if (format < FLOATS4) check_rounded_products<T>((Format)format, 33, 576);
        if (format > BFLOAT16 && format < FLOATS4) check_rounded_products<T>((Format)format, 100, 96);
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
