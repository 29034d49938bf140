// Products of rows in 8 bits: the bits of plain loops over whole numbers, whatever the processor.
// For native_check.cpp, which has `Packed`, `check` and the like.

#pragma once

namespace {

template <class T>
void check_rounded_products(Format format, int columns, int depth) {
    std::string name = type<T>() + " in 8 bits times format " + std::to_string(format) + " of "
                       + std::to_string(columns) + " x " + std::to_string(depth);
    const int rows = 29, block = Packed::block_of(format);
    Packed packed(format, columns, depth);
    int32_t rounds = 1;
    packed.weight.rounds = &rounds;
    auto x = Random(depth).numbers<T>(rows * depth, 3);
    for (int k = 0; k < depth; k++) x[2 * depth + k] = T{};
    std::vector<T> expected;
    for (int r = 0; r < rows; r++) {
        std::vector<int> whole(depth);
        std::vector<float> scales(depth / block);
        for (int k = 0; k < depth; k++) {
            float most = 0;
            for (int i = k / 32 * 32; i < std::min(depth, k / 32 * 32 + 32); i++)
                most = std::max(most, std::abs(number(x[r * depth + i])));
            scales[k / block] = most / 127;
            whole[k] = most > 0 ? std::lrint(number(x[r * depth + k]) * (127 / most)) : 0;
        }
        for (int c = 0; c < columns; c++) {
            float sum = 0;
            for (int b = 0; b < depth / block; b++) {
                int products = 0, total = 0;
                for (int k = b * block; k < (b + 1) * block; k++)
                    products += whole[k] * packed.whole[c * depth + k], total += whole[k];
                float scale = packed.scales[c * (depth / block) + b];
                float part = (float)products * scale, least = (float)total * (-8 * scale);
                if (!Packed::has_levels(format)) part = part + least;
                sum = sum + part * scales[b];
            }
            T out[W] = {};
            store(out, all(sum + packed.bias[c]));
            expected.push_back(out[0]);
        }
    }
    check_in_any_company(x, expected, packed.weight, columns, depth,
                         {rows, 13, 7, 6, 5, 4, 3, 2, 1}, name);
}

}  // namespace
