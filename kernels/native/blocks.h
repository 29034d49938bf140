// Blocks of GGUF files into panels, without tables of their numbers between.
//
// A format has numbers from 0 on, and a scale and a minimum for each 16 or 32 of them, or codes and
// a scale, as `Quantized` in kernels/quantized.py; the bits are those of
// runtime/model/gguf/blocks.py.

#pragma once

#include "linear.h"

namespace {

// A stored block: its bytes, and up to 256 numbers with 16 scales and minimums.
struct Block {
    const uint8_t* from;
    uint8_t numbers[256];
    float scales[16], minimums[16];

    float half_at(int at) const { return number(read<fp16>(from + at)); }

    // Of a format without minimums, in which the number `zero` stands for 0: in two's complement.
    void signs(int count, int zero, int mask) {
        for (int i = 0; i < count; i++) numbers[i] = (numbers[i] - zero) & mask;
    }

    // Numbers of `width` bits: of each `group` of `count` bytes first the lowest bits of all.
    void fields(int at, int count, int width, int group) {
        for (int i = 0; i < count; i += group)
            for (int shift = 0; shift < 8; shift += width)
                for (int j = 0; j < group; j++)
                    numbers[i * 8 / width + shift / width * group + j]
                        = from[at + i + j] >> shift & ((1 << width) - 1);
    }

    // The same of higher bits, from bit `to` of the numbers on.
    void higher(int at, int count, int width, int group, int to) {
        for (int i = 0; i < count; i += group)
            for (int shift = 0; shift < 8; shift += width)
                for (int j = 0; j < group; j++)
                    numbers[i * 8 / width + shift / width * group + j]
                        |= (from[at + i + j] >> shift & ((1 << width) - 1)) << to;
    }

    // Scales and minimums of Q4_K and Q5_K, of 6 bits each in 12 bytes.
    void scales_of_k() {
        const uint8_t *first = from + 4, *second = from + 8, *last = from + 12;
        float scale = half_at(0), minimum = half_at(2);
        for (int i = 0; i < 4; i++) {
            scales[i] = scale * (first[i] & 63);
            scales[i + 4] = scale * ((last[i] & 15) | first[i] >> 6 << 4);
            minimums[i] = minimum * -(float)(second[i] & 63);
            minimums[i + 4] = minimum * -(float)(last[i] >> 4 | second[i] >> 6 << 4);
        }
    }
};

void five_bits(Block& b, int at) {
    b.fields(at + 4, 16, 4, 16);
    for (int i = 0; i < 32; i++) b.numbers[i] |= (b.from[at + i / 8] >> i % 8 & 1) << 4;
}

// A format: weights and bytes of a stored block, and what decodes it.
struct Stored {
    int size, bytes;
    void (*decode)(Block&);
};

// In the order of blocks.py.
const Stored STORED[] = {
    {32, 18, [](Block& b) {  // Q4_0
         b.fields(2, 16, 4, 16), b.signs(32, 8, 15);
         b.scales[0] = b.half_at(0);
     }},
    {32, 20, [](Block& b) {  // Q4_1
         b.fields(4, 16, 4, 16);
         b.scales[0] = b.half_at(0), b.minimums[0] = b.half_at(2);
     }},
    {32, 22, [](Block& b) {  // Q5_0
         five_bits(b, 2), b.signs(32, 16, 255);
         b.scales[0] = b.half_at(0);
     }},
    {32, 24, [](Block& b) {  // Q5_1
         five_bits(b, 4);
         b.scales[0] = b.half_at(0), b.minimums[0] = b.half_at(2);
     }},
    {32, 34, [](Block& b) {  // Q8_0
         memcpy(b.numbers, b.from + 2, 32);
         b.scales[0] = b.half_at(0);
     }},
    {256, 84, [](Block& b) {  // Q2_K
         b.fields(16, 64, 2, 32);
         for (int i = 0; i < 16; i++) {
             b.scales[i] = b.half_at(80) * (b.from[i] & 15);
             b.minimums[i] = b.half_at(82) * -(float)(b.from[i] >> 4);
         }
     }},
    {256, 110, [](Block& b) {  // Q3_K
         b.fields(32, 64, 2, 32);
         b.higher(0, 32, 1, 32, 2);
         for (int i = 0; i < 16; i++) {
             int low = b.from[96 + i % 8] >> i / 8 * 4 & 15, high = b.from[104 + i % 4] >> i / 4 * 2;
             b.scales[i] = b.half_at(108) * (float)((low | (high & 3) << 4) - 32);
         }
     }},
    {256, 144, [](Block& b) {  // Q4_K
         b.fields(16, 128, 4, 32);
         b.scales_of_k();
     }},
    {256, 176, [](Block& b) {  // Q5_K
         b.fields(48, 128, 4, 32);
         b.higher(16, 32, 1, 32, 4);
         b.scales_of_k();
     }},
    {256, 210, [](Block& b) {  // Q6_K
         b.fields(0, 128, 4, 64);
         b.higher(128, 64, 2, 32, 4), b.signs(256, 32, 255);
         for (int i = 0; i < 16; i++) b.scales[i] = b.half_at(208) * (int8_t)b.from[192 + i];
     }},
    {32, 18, [](Block& b) {  // IQ4_NL
         b.fields(2, 16, 4, 16);
         b.scales[0] = b.half_at(0);
     }},
    {256, 136, [](Block& b) {  // IQ4_XS
         b.fields(8, 128, 4, 16);
         for (int i = 0; i < 8; i++) {
             int low = b.from[4 + i / 2] >> i % 2 * 4 & 15, high = b.from[2 + i / 4] >> i % 4 * 2;
             b.scales[i] = b.half_at(0) * (float)((low | (high & 3) << 4) - 32);
         }
     }},
    {32, 17, [](Block& b) {  // MXFP4: half the scale, for levels are twice the values
         b.fields(1, 16, 4, 16);
         uint32_t e = b.from[0], bits = e < 2 ? 1u << 21 << e : (e - 1) << 23;
         memcpy(b.scales, &bits, 4);
     }},
};

// Rows of one format, as they stand in a file.
struct StoredRows {
    const uint8_t* data;
    int64_t rows, format;
};

// Of parts below each other, whose formats have the same bits and blocks; `head`: scales and minimums
// of a block, or scales alone.
void pack_stored(const StoredRows* part, int bits, int block, int head, int64_t rows, int64_t depth,
                 uint32_t* panels, int threads) {
    int64_t words = depth / block * head + depth * bits / 32;
    pack(rows, words, panels, threads, [&](int64_t row, uint32_t* to) {
        const StoredRows* of = part;
        for (; row >= of->rows; of++) row -= of->rows;
        const Stored& stored = STORED[of->format];
        Block b;
        b.from = of->data + row * (depth / stored.size) * stored.bytes;
        for (int64_t k = 0; k < depth; k += stored.size, b.from += stored.bytes) {
            stored.decode(b);
            to = write_blocks(b.numbers, b.scales, head == 2 ? b.minimums : nullptr, bits, block,
                              stored.size / block, to);
        }
    });
}

}  // namespace
