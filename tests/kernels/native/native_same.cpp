// A compiled library against the kernels as this program has them: the same bits, or it says where.
//
//     c++ -std=c++17 -O3 -ffp-contract=off -pthread native_same.cpp -o same && ./same LIBRARY
//
// Compiled for another processor it runs under an emulator. The last argument may be `wrong`, which
// changes one number of each comparison.

#define main check_main
#include "native_check.cpp"
#undef main

#include <dlfcn.h>

namespace {

template <class T>
void* const* own() {
    return sizeof(T) == 4 ? radixcache_float32 : radixcache_bfloat16;
}

// One of this program's functions, as a table has it: its place is that in our own table.
template <class T, class Function>
Function* in(void* const* kernels, Function* function) {
    auto all = std::end(radixcache_float32) - std::begin(radixcache_float32);
    auto found = std::find(own<T>(), own<T>() + all, (void*)function) - own<T>();
    return found < all ? (Function*)kernels[found] : (printf("no such kernel\n"), exit(2), nullptr);
}

template <class T>
void compare_products(void* const* theirs) {
    auto product = in<T>(theirs, linear<T>);
    for (int format = FLOAT32; format <= FLOATS8; format++)
        for (int rows : {1, 3, 7, 40}) {
            Packed packed((Format)format, 100, 96);
            const auto x = Random(rows).numbers<T>(rows * 96, 3);
            std::vector<T> out(rows * 100), other(rows * 100);
            linear<T>(x.data(), 96, packed.weight, out.data(), rows, 1);
            product(x.data(), 96, packed.weight, other.data(), rows, 2);
            check(same(out, other), type<T>() + " times format " + std::to_string(format));
        }
}

// A model of one layer: attention with RoPE, then a gated MLP; embedding and head are one weight.
template <class T>
void compare_steps(void* const* theirs) {
    constexpr int HIDDEN = 96, INNER = 160, TOKENS = 300, WORDS = 50, DIM = 32;
    Packed table(FLOAT32, WORDS, HIDDEN), q(BITS4, 3 * DIM, HIDDEN), k(BITS8, DIM, HIDDEN);
    Packed v(BFLOAT16, DIM, HIDDEN), o(FLOAT32, HIDDEN, 3 * DIM), gate(BITS4, INNER, HIDDEN);
    Packed up(BITS8, INNER, HIDDEN), down(LEVELS4, HIDDEN, INNER);
    const auto norm = Random(1).numbers<float>(HIDDEN, 1), turns = Random(2).numbers<float>(16, 1);
    std::vector<int32_t> pages(TOKENS / 4), ends{0, TOKENS}, tables{0, TOKENS / 4};
    std::vector<int64_t> slots(TOKENS), ids(TOKENS), positions(TOKENS), wanted{0, 70, TOKENS - 1};
    for (int i = 0; i < TOKENS / 4; i++) pages[i] = TOKENS / 4 - 1 - i;
    for (int i = 0; i < TOKENS; i++)
        slots[i] = pages[i / 4] * 4 + i % 4, ids[i] = i * 7 % WORDS, positions[i] = i;
    int32_t length = TOKENS, first = 0;
    Batch batch{1, 4, ends.data(), tables.data(), pages.data(), &length, &first, slots.data()};

    AttentionLayer attention{};
    attention.heads = {3, 1, DIM, DIM, NONE, 0.2f, 0};
    attention.in[0] = q.weight, attention.in[1] = k.weight, attention.in[2] = v.weight;
    attention.out = o.weight;
    MLP mlp{{gate.weight, up.weight}, down.weight, INNER, true, SILU};
    Joint joint{nullptr, norm.data(), 1, 1, false};
    Sublayer layers[] = {{&attention, nullptr, joint, ATTENTION, -1},
                         {&mlp, nullptr, joint, DENSE, -1}};
    RopeTable rope{turns.data(), nullptr, 1, 16};
    Model model{layers, &rope, nullptr, 2, 1, 0, HIDDEN, 5 * DIM, 3 * DIM, INNER, false, 1e-5f,
                1, 0, joint, table.weight, table.weight};
    auto step = [&](void* const* kernels) {
        std::vector<T> keys(TOKENS * DIM), values(keys);
        auto format = sizeof(T) == 4 ? KVFormat::FLOAT32 : KVFormat::BFLOAT16;
        Pages kept{(char*)keys.data(), (char*)values.data(), 4 * DIM * sizeof(T),
                   4 * DIM * sizeof(T), format};
        std::vector<float> logits(wanted.size() * WORDS);
        auto run = in<T>(kernels, forward<T>);
        run(model, batch, batch, &kept, States{}, ids.data(), positions.data(), wanted.data(),
            wanted.size(), logits.data(), nullptr, 0, nullptr, 2);
        check(*std::max_element(logits.begin(), logits.end()) > 0, "logits are numbers");
        return logits;
    };
    check(same(step(own<T>()), step(theirs)), type<T>() + " logits of a model");
}

// Attention with the write into pages, as Python calls it: the second of two sequences is decoded.
template <class T>
void compare_attention(void* const* theirs) {
    std::vector<int32_t> ends{0, 30, 31}, tables{0, 2, 24}, pages, lens{30, 340}, first{0, 0};
    std::vector<int64_t> slots;
    for (int i = 0; i < 24; i++) pages.push_back(23 - i);
    for (int i = 0; i < 30; i++) slots.push_back(pages[i / 16] * 16 + i % 16);
    slots.push_back(pages[2 + 339 / 16] * 16 + 339 % 16);
    Batch batch{2, 16, ends.data(), tables.data(), pages.data(), lens.data(), first.data(),
                slots.data()};
    Heads heads{6, 2, 40, 40, NONE, 0.15f, 0};
    auto step = [&](void* const* kernels) {
        auto q = Random(1).numbers<T>(31 * 240, 3), k = Random(2).numbers<T>(31 * 80, 3);
        auto v = Random(3).numbers<T>(31 * 80, 2), keys = Random(4).numbers<T>(24 * 16 * 80, 3);
        auto values = Random(5).numbers<T>(24 * 16 * 80, 2), out = q;
        int64_t page = 16 * 80 * sizeof(T);
        Pages kept{(char*)keys.data(), (char*)values.data(), page, page,
                   sizeof(T) == 4 ? KVFormat::FLOAT32 : KVFormat::BFLOAT16};
        auto run = in<T>(kernels, attend<T>);
        run(batch, heads, q.data(), 240, k.data(), 80, v.data(), 80, kept, out.data(), nullptr, 2);
        return out;
    };
    check(same(step(own<T>()), step(theirs)), type<T>() + " attention");
}

template <class T>
void compare_all(void* library) {
    auto theirs = (void* const*)dlsym(
        library, sizeof(T) == 4 ? "radixcache_float32" : "radixcache_bfloat16");
    compare_products<T>(theirs), compare_attention<T>(theirs), compare_steps<T>(theirs);
}

}  // namespace

int main(int count, char** arguments) {
    void* library = count > 1 ? dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!library) return printf("no library: %s\n", dlerror()), 2;
    wrong = count > 2 && !strcmp(arguments[2], "wrong");
    compare_all<float>(library), compare_all<bf16>(library);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
