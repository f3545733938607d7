// Matrices as the linear op reads them: panels of 16 outputs, each panel one run of bytes in the order of its inputs.
//
// FLOAT32, FLOAT16, BFLOAT16: [inputs][16].
// INT8: for each 32 inputs [16 pairs of inputs][16][2] integers, then 16 half-float scales.
// INT4: for each 32 inputs [8 fours of inputs][8][4] bytes, the low half of a byte for output j, the high half for
// output 8 + j; then 16 half-float scales and 16 half-float offsets. A weight is integer * scale + offset.
// Source: llama.cpp, ggml-common.h, for the blocks of GGUF files.
#pragma once

#include "step.h"

namespace weir {

// The integers of one group of a panel, and all of the group.
constexpr int INT8_BYTES = PANEL * GROUP, INT8_GROUP_BYTES = INT8_BYTES + 2 * PANEL;
constexpr int INT4_BYTES = PANEL * GROUP / 2, INT4_GROUP_BYTES = INT4_BYTES + 4 * PANEL;

enum class Source : uint8_t { FLOAT32, FLOAT16, BFLOAT16, Q8_0, Q4_0, Q4_1, Q4_K };

INLINE int64_t panel_bytes(Format format, int num_inputs) {
  switch (format) {
    case Format::FLOAT32: return int64_t{4} * PANEL * num_inputs;
    case Format::FLOAT16:
    case Format::BFLOAT16: return int64_t{2} * PANEL * num_inputs;
    case Format::INT8: return int64_t{num_inputs / GROUP} * INT8_GROUP_BYTES;
    case Format::INT4: return int64_t{num_inputs / GROUP} * INT4_GROUP_BYTES;
  }
  return 0;
}

INLINE uint16_t read_half(const uint8_t* from) {
  uint16_t half;
  memcpy(&half, from, 2);
  return half;
}

// One group of a row whose source is four-bit: 32 integers, their scale and offset.
inline void read_four_bit(Source source, const uint8_t* row, int group, uint8_t* integers, float* scale, float* offset) {
  if (source == Source::Q4_K) {  // 256 weights: scale of scales, scale of offsets, 12 bytes of six-bit pairs, 128 bytes
    const uint8_t* const block = row + group / 8 * 144;
    const uint8_t* const packed = block + 4;
    const int index = group % 8;
    int six_scale, six_offset;
    if (index < 4) {
      six_scale = packed[index] & 63;
      six_offset = packed[index + 4] & 63;
    } else {
      six_scale = (packed[index + 4] & 15) | (packed[index - 4] >> 6 << 4);
      six_offset = (packed[index + 4] >> 4) | (packed[index] >> 6 << 4);
    }
    *scale = half_to_float(read_half(block)) * six_scale;
    *offset = -half_to_float(read_half(block + 2)) * six_offset;
    const uint8_t* const bytes = block + 16 + index / 2 * 32;
    for (int i = 0; i < GROUP; i++) integers[i] = index % 2 ? bytes[i] >> 4 : bytes[i] & 15;
    return;
  }
  const int header = source == Source::Q4_1 ? 4 : 2;
  const uint8_t* const block = row + group * (header + 16);
  *scale = half_to_float(read_half(block));
  *offset = source == Source::Q4_1 ? half_to_float(read_half(block + 2)) : -8.0f * *scale;
  for (int i = 0; i < 16; i++) {
    integers[i] = block[header + i] & 15;
    integers[16 + i] = block[header + i] >> 4;
  }
}

inline float read_float(Source source, const uint8_t* row, int index) {
  switch (source) {
    case Source::FLOAT32: return reinterpret_cast<const float*>(row)[index];
    case Source::FLOAT16: return half_to_float(reinterpret_cast<const uint16_t*>(row)[index]);
    case Source::BFLOAT16: return bfloat_to_float(reinterpret_cast<const uint16_t*>(row)[index]);
    case Source::Q8_0: {
      const uint8_t* const block = row + index / GROUP * 34;
      return half_to_float(read_half(block)) * static_cast<int8_t>(block[2 + index % GROUP]);
    }
    default: {
      uint8_t integers[GROUP];
      float scale, offset;
      read_four_bit(source, row, index / GROUP, integers, &scale, &offset);
      return integers[index % GROUP] * scale + offset;
    }
  }
}

INLINE void write_half(uint8_t* to, float value) {
  const uint16_t half = float_to_half(value);
  memcpy(to, &half, 2);
}

inline void pack_int8(const uint8_t* const* rows, const Source* sources, int num_inputs, uint8_t* panel) {
  for (int group = 0; group < num_inputs / GROUP; group++, panel += INT8_GROUP_BYTES) {
    for (int output = 0; output < PANEL; output++) {
      int8_t integers[GROUP] = {};
      float scale = 0;
      if (rows[output] && sources[output] == Source::Q8_0) {
        const uint8_t* const block = rows[output] + group * 34;
        scale = half_to_float(read_half(block));
        memcpy(integers, block + 2, GROUP);
      } else if (rows[output]) {
        float values[GROUP], peak = 0;
        for (int i = 0; i < GROUP; i++) {
          values[i] = read_float(sources[output], rows[output], group * GROUP + i);
          peak = peak > __builtin_fabsf(values[i]) ? peak : __builtin_fabsf(values[i]);
        }
        scale = half_to_float(float_to_half(peak / 127));
        for (int i = 0; i < GROUP; i++) {
          const float scaled = scale > 0 ? __builtin_rintf(values[i] / scale) : 0;
          integers[i] = static_cast<int8_t>(scaled > 127 ? 127 : scaled < -127 ? -127 : scaled);
        }
      }
      for (int i = 0; i < GROUP; i++) panel[i / 2 * 2 * PANEL + 2 * output + i % 2] = static_cast<uint8_t>(integers[i]);
      write_half(panel + INT8_BYTES + 2 * output, scale);
    }
  }
}

inline void pack_int4(const uint8_t* const* rows, const Source* sources, int num_inputs, uint8_t* panel) {
  for (int group = 0; group < num_inputs / GROUP; group++, panel += INT4_GROUP_BYTES) {
    memset(panel, 0, INT4_BYTES);
    for (int output = 0; output < PANEL; output++) {
      uint8_t integers[GROUP] = {};
      float scale = 0, offset = 0;
      if (rows[output]) read_four_bit(sources[output], rows[output], group, integers, &scale, &offset);
      for (int i = 0; i < GROUP; i++) {
        panel[i / 4 * 32 + output % 8 * 4 + i % 4] |= static_cast<uint8_t>(integers[i] << (output < 8 ? 0 : 4));
      }
      write_half(panel + INT4_BYTES + 2 * output, scale);
      write_half(panel + INT4_BYTES + 2 * PANEL + 2 * output, offset);
    }
  }
}

inline void pack_panel(Format format, const uint8_t* const* rows, const Source* sources, int num_inputs, uint8_t* panel) {
  if (format == Format::INT8) return pack_int8(rows, sources, num_inputs, panel);
  if (format == Format::INT4) return pack_int4(rows, sources, num_inputs, panel);
  for (int input = 0; input < num_inputs; input++) {
    for (int output = 0; output < PANEL; output++) {
      const float value = rows[output] ? read_float(sources[output], rows[output], input) : 0.0f;
      const int index = input * PANEL + output;
      if (format == Format::FLOAT32) {
        reinterpret_cast<float*>(panel)[index] = value;
      } else {
        reinterpret_cast<uint16_t*>(panel)[index] = format == Format::FLOAT16 ? float_to_half(value) : float_to_bfloat(value);
      }
    }
  }
}

// One output's weights, as floats: what the panel stands for.
inline void unpack_row(const Matrix& matrix, int output, float* row) {
  const uint8_t* panel = matrix.panels + output / PANEL * matrix.panel_bytes;
  const int lane = output % PANEL;
  for (int input = 0; input < matrix.num_inputs; input++) {
    const int group = input / GROUP, i = input % GROUP;
    switch (matrix.format) {
      case Format::FLOAT32: row[input] = reinterpret_cast<const float*>(panel)[input * PANEL + lane]; break;
      case Format::FLOAT16: row[input] = half_to_float(reinterpret_cast<const uint16_t*>(panel)[input * PANEL + lane]); break;
      case Format::BFLOAT16: row[input] = bfloat_to_float(reinterpret_cast<const uint16_t*>(panel)[input * PANEL + lane]); break;
      case Format::INT8: {
        const uint8_t* const at = panel + int64_t{group} * INT8_GROUP_BYTES;
        row[input] = static_cast<int8_t>(at[i / 2 * 2 * PANEL + 2 * lane + i % 2]) * half_to_float(read_half(at + INT8_BYTES + 2 * lane));
        break;
      }
      case Format::INT4: {
        const uint8_t* const at = panel + int64_t{group} * INT4_GROUP_BYTES;
        const int byte = at[i / 4 * 32 + lane % 8 * 4 + i % 4], integer = lane < 8 ? byte & 15 : byte >> 4;
        const uint8_t* const scales = at + INT4_BYTES;
        row[input] = integer * half_to_float(read_half(scales + 2 * lane)) + half_to_float(read_half(scales + 2 * PANEL + 2 * lane));
        break;
      }
    }
  }
}

}  // namespace weir
