//! Decoding of every checkpoint format against vectors that other libraries computed (tests/golden).
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::float_cmp, reason = "tests")]
#![allow(missing_docs, reason = "tests")]

use lk_core::Dtype;
use lk_core::format::{ScaleKind, WeightFormat, code, reference};
use lk_core::kernel::{KernelSet, Operand, Rows};
use lk_core::simd::Cpu;
use lk_core::tile::{
    CheckpointView, ExpertMatrix, ExpertSlice, NR, PackError, Tensor, TileLayout, pack_panels,
};
use safetensors::SafeTensors;

fn golden(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/../../tests/golden/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

fn dtype(d: safetensors::Dtype) -> Dtype {
    Dtype::parse(&format!("{d:?}")).unwrap()
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// A golden file and how its tensors are called by a layer.
struct Case {
    file: &'static str,
    format: WeightFormat,
    /// (name in the file, name of the parameter without prefix)
    names: &'static [(&'static str, &'static str)],
    expected: &'static str,
    gptq_v1: bool,
}

fn cases() -> Vec<Case> {
    use ScaleKind::{Bf16, E8m0, F16, F32};
    let case = |file, format, names, expected| Case { file, format, names, expected, gptq_v1: false };
    let gptq: &[(&str, &str)] =
        &[("qweight", "qweight"), ("scales", "scales"), ("qzeros", "qzeros"), ("g_idx", "g_idx")];
    let ct: &[(&str, &str)] = &[("weight_packed", "weight_packed"), ("weight_scale", "weight_scale")];
    let ct_zp: &[(&str, &str)] = &[
        ("weight_packed", "weight_packed"),
        ("weight_scale", "weight_scale"),
        ("weight_zero_point", "weight_zero_point"),
    ];
    let scaled: &[(&str, &str)] = &[("weight", "weight"), ("weight_scale", "weight_scale")];
    vec![
        case(
            "fp8_block128_f32scale",
            WeightFormat::fp8_block(F32, 128, 128),
            &[("weight", "weight"), ("weight_scale_inv", "weight_scale_inv")],
            "expected",
        ),
        case(
            "fp8_block128_ue8m0scale",
            WeightFormat::fp8_block(E8m0, 128, 128),
            &[("weight", "weight"), ("scale", "weight_scale_inv")],
            "expected",
        ),
        case("fp8_pb_wo", WeightFormat::fp8_block(F32, 128, 128), scaled, "expected"),
        case("fp8_tensor", WeightFormat::FP8_TENSOR, scaled, "expected"),
        case("fp8_channel", WeightFormat::fp8_channel(F32), scaled, "expected"),
        case("int8_channel", WeightFormat::int8(F32, 0, false), scaled, "expected"),
        case("mxfp8", WeightFormat::MXFP8, scaled, "expected"),
        case("ct_int4_g32_sym", WeightFormat::int4(Bf16, 32, false), ct, "expected"),
        case("ct_int4_g128_sym", WeightFormat::int4(Bf16, 128, false), ct, "expected"),
        case("ct_int4_channel_sym", WeightFormat::int4(Bf16, 0, false), ct, "expected"),
        case("ct_int4_g128_asym", WeightFormat::int4(Bf16, 128, true), ct_zp, "expected"),
        case("ct_int8_g128_sym", WeightFormat::int8(Bf16, 128, false), ct, "expected"),
        case("ct_int8_channel_asym", WeightFormat::int8(Bf16, 0, true), ct_zp, "expected"),
        case(
            "nvfp4_modelopt",
            WeightFormat::NVFP4,
            &[("weight", "weight"), ("weight_scale", "weight_scale"), ("weight_scale_2", "weight_scale_2")],
            "expected",
        ),
        case(
            "nvfp4_compressed_tensors",
            WeightFormat::NVFP4_DIVIDE,
            &[
                ("weight_packed", "weight_packed"),
                ("weight_scale", "weight_scale"),
                ("weight_global_scale", "weight_global_scale"),
            ],
            "expected",
        ),
        case(
            "mxfp4_rows",
            WeightFormat::MXFP4,
            &[("weight", "weight"), ("scale_e8m0_bytes", "weight_scale")],
            "expected",
        ),
        case(
            "awq_int4_g64",
            WeightFormat::int4(F16, 64, true),
            &[("qweight", "qweight"), ("scales", "scales"), ("qzeros", "qzeros")],
            "expected_in_out",
        ),
        Case {
            gptq_v1: true,
            ..case("gptq_int4_g64", WeightFormat::int4(F16, 64, true), gptq, "expected_in_out")
        },
        Case {
            gptq_v1: true,
            ..case("gptq_int8_g64", WeightFormat::int8(F16, 64, true), gptq, "expected_in_out")
        },
        Case {
            gptq_v1: true,
            ..case(
                "gptq_int4_g64_actorder",
                WeightFormat::int4(F16, 64, true).with_act_order(),
                gptq,
                "expected_in_out",
            )
        },
    ]
}

/// Equal bits, but for the sign of zero; `ulps` of slack where libraries differ in the order of two scales.
fn same(a: f32, b: f32, ulps: u32) -> bool {
    a == b || a.is_nan() && b.is_nan() || a.to_bits().abs_diff(b.to_bits()) <= ulps
}

fn slack(format: WeightFormat) -> u32 {
    u32::from(format.global != lk_core::format::GlobalScale::None && format.scale.is_some())
}

fn slice(matrix: ExpertMatrix, hidden_size: usize, intermediate_size: usize) -> ExpertSlice {
    ExpertSlice {
        matrix,
        hidden_size,
        intermediate_size,
        gated: true,
        interleaved: false,
        start: 0,
        len: intermediate_size,
        gptq_v1: false,
    }
}

fn pack(view: &CheckpointView<'_>) -> (TileLayout, Vec<u8>) {
    let layout = view.layout().unwrap();
    let mut packed = vec![0x5a; layout.bytes()];
    pack_panels(view, &layout, 0..layout.panels(), &mut packed, 1).unwrap();
    (layout, packed)
}

/// The tensors of a case under `w2_…` (or `w13_…`) and `[n, k]` expected values.
fn with_case(case: &Case, prefix: &str, test: impl Fn(&[(&str, Tensor<'_>)], usize, usize, &[f32])) {
    let bytes = golden(&format!("{}.safetensors", case.file));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let expected = file.tensor(case.expected).unwrap();
    let (mut n, mut k) = (expected.shape()[0], expected.shape()[1]);
    let mut values = f32s(expected.data());
    if case.expected == "expected_in_out" {
        (n, k) = (k, n);
        let turned: Vec<f32> = (0..n * k).map(|i| values[i % k * n + i / k]).collect();
        values = turned;
    }
    let names: Vec<String> = case.names.iter().map(|(_, to)| format!("{prefix}_{to}")).collect();
    let views: Vec<_> = case.names.iter().map(|(from, _)| file.tensor(from).unwrap()).collect();
    let tensors: Vec<_> = names
        .iter()
        .zip(&views)
        .map(|(name, t)| {
            (name.as_str(), Tensor { dtype: dtype(t.dtype()), shape: t.shape(), bytes: t.data() })
        })
        .collect();
    test(&tensors, n, k, &values);
}

#[test]
fn packed_matrices_decode_to_the_published_values() {
    for case in cases() {
        with_case(&case, "w2", |tensors, n, k, expected| {
            let slice = ExpertSlice { gptq_v1: case.gptq_v1, ..slice(ExpertMatrix::Down, n, k) };
            let view = CheckpointView::expert(case.format, tensors, &slice).unwrap();
            let (layout, packed) = pack(&view);
            let decoded = reference::decode(&layout, &packed);
            for (i, (a, b)) in decoded.iter().zip(expected).enumerate() {
                assert!(
                    same(*a, *b, slack(case.format)),
                    "{} [{}, {}]: {a:e} {b:e}",
                    case.file,
                    i / k,
                    i % k
                );
            }
        });
    }
}

#[test]
fn kernels_decode_every_weight_to_the_published_values() {
    let cpu = Cpu::detect();
    for case in cases() {
        with_case(&case, "w2", |tensors, n, k, expected| {
            let slice = ExpertSlice { gptq_v1: case.gptq_v1, ..slice(ExpertMatrix::Down, n, k) };
            let (layout, packed) = pack(&CheckpointView::expert(case.format, tensors, &slice).unwrap());
            // Row i is the unit vector of k = i: the sum is one weight.
            let width = layout.k_padded();
            let unit: Vec<f32> =
                (0..k * width).map(|i| f32::from(u8::from(i / width == i % width))).collect();
            let bits: Vec<u16> = unit.iter().map(|&x| if x == 0.0 { 0 } else { 0x3f80 }).collect();
            let kernels = KernelSet::all(case.format, cpu);
            assert!(!kernels.is_empty());
            for kernel in kernels {
                let rows = match kernel.operand() {
                    Operand::F32 => Rows::f32(&unit, width, width),
                    Operand::Bf16 => Rows::bf16(&bits, width, width),
                };
                // One row at a time and all at once take different paths through scales.
                for one in [true, false] {
                    let mut out = vec![0.0; k * NR];
                    for p in 0..layout.panels() {
                        let panel = layout.panel(&packed, p);
                        if one {
                            for (r, out) in out.chunks_exact_mut(NR).enumerate() {
                                kernel.run(panel, &layout, &rows.range(r, 1), out);
                            }
                        } else {
                            kernel.run(panel, &layout, &rows, &mut out);
                        }
                        for c in 0..NR.min(n - p * NR) {
                            for r in 0..k {
                                let (a, b) = (out[r * NR + c], expected[(p * NR + c) * k + r]);
                                // bf16 products treat subnormal numbers as zero (a scale of 2^-127).
                                let flushed = kernel.operand() == Operand::Bf16 && a == 0.0 && !b.is_normal();
                                let ok = flushed || same(a, b, 2 * slack(case.format));
                                assert!(ok, "{} {} [{c}, {r}]: {a:e} {b:e}", kernel.name(), case.file);
                            }
                        }
                    }
                }
            }
        });
    }
}

#[test]
fn slices_of_w2_and_halves_of_w13_are_parts_of_the_matrix() {
    for case in cases() {
        with_case(&case, "w2", |tensors, n, k, expected| {
            for (start, len) in [(0, 32), (32, k - 32)] {
                let slice =
                    ExpertSlice { start, len, gptq_v1: case.gptq_v1, ..slice(ExpertMatrix::Down, n, k) };
                let (layout, packed) = pack(&CheckpointView::expert(case.format, tensors, &slice).unwrap());
                let whole = TileLayout::slice_of(case.format, n, len, 0, start, k).unwrap();
                assert_eq!(whole, layout, "{}", case.file);
                for (i, a) in reference::decode(&layout, &packed).iter().enumerate() {
                    let b = expected[i / len * k + start + i % len];
                    assert!(same(*a, b, slack(case.format)), "{} from {start}: {a:e} {b:e}", case.file);
                }
            }
        });
        // As w13 the rows are gate and up. A block grid begins anew with up, which these files do not.
        let blocks = case.format.scale.is_some_and(|s| s.rows > 1);
        if blocks {
            continue;
        }
        with_case(&case, "w13", |tensors, n, k, expected| {
            let inner = n / 2;
            for (matrix, first) in [(ExpertMatrix::Gate, 0), (ExpertMatrix::Up, inner)] {
                for (start, len) in [(0, inner), (inner / 2, inner / 2)] {
                    let slice = ExpertSlice { start, len, gptq_v1: case.gptq_v1, ..slice(matrix, k, inner) };
                    if case.names[0].0 == "qweight" && (first + start) % 8 != 0 {
                        continue;
                    }
                    let view = CheckpointView::expert(case.format, tensors, &slice).unwrap();
                    let (layout, packed) = pack(&view);
                    for (i, a) in reference::decode(&layout, &packed).iter().enumerate() {
                        let b = expected[(first + start + i / k) * k + i % k];
                        assert!(same(*a, b, slack(case.format)), "{} {matrix:?}: {a:e} {b:e}", case.file);
                    }
                }
            }
        });
    }
}

#[test]
fn interleaved_gate_and_up_rows_come_apart() {
    let bytes = golden("mxfp4_gpt_oss.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (blocks, scales) =
        (file.tensor("gate_up_proj_blocks").unwrap(), file.tensor("gate_up_proj_scales").unwrap());
    for expert in 0..2 {
        let tensors = [
            (
                "w13_weight",
                Tensor { dtype: Dtype::U8, shape: &[8, 32], bytes: &blocks.data()[expert * 256..][..256] },
            ),
            (
                "w13_weight_scale",
                Tensor { dtype: Dtype::U8, shape: &[8, 2], bytes: &scales.data()[expert * 16..][..16] },
            ),
        ];
        for (matrix, name) in [(ExpertMatrix::Gate, "expected_gate"), (ExpertMatrix::Up, "expected_up")] {
            let slice = ExpertSlice { interleaved: true, ..slice(matrix, 64, 4) };
            let (layout, packed) =
                pack(&CheckpointView::expert(WeightFormat::MXFP4, &tensors, &slice).unwrap());
            let expected = f32s(file.tensor(name).unwrap().data());
            for (a, b) in reference::decode(&layout, &packed).iter().zip(&expected[expert * 256..]) {
                assert!(same(*a, *b, 0), "{name}: {a:e} {b:e}");
            }
        }
    }
}

#[test]
fn gate_and_up_keep_their_own_block_grids_and_matrix_scales() {
    // I = 130 with blocks of 128: up's grid begins on row 2.
    let (hidden, inner) = (64, 130);
    let codes = vec![0x38u8; 2 * inner * hidden];
    let scales: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0].iter().flat_map(|s| s.to_le_bytes()).collect();
    let format = WeightFormat::fp8_block(ScaleKind::F32, 128, 128);
    let tensors = [
        ("w13_weight", Tensor { dtype: Dtype::E4m3, shape: &[2 * inner, hidden], bytes: &codes }),
        ("w13_weight_scale_inv", Tensor { dtype: Dtype::F32, shape: &[4, 1], bytes: &scales }),
    ];
    for (matrix, values) in [(ExpertMatrix::Gate, [1.0, 2.0]), (ExpertMatrix::Up, [3.0, 4.0])] {
        let view = CheckpointView::expert(format, &tensors, &slice(matrix, hidden, inner)).unwrap();
        let (layout, packed) = pack(&view);
        let decoded = reference::decode(&layout, &packed);
        assert_eq!([decoded[0], decoded[129 * hidden]], values);
    }
    let pair: Vec<u8> = [0.5f32, 0.25].iter().flat_map(|s| s.to_le_bytes()).collect();
    let tensors = [tensors[0], ("w13_weight_scale", Tensor { dtype: Dtype::F32, shape: &[2], bytes: &pair })];
    for (matrix, value) in [(ExpertMatrix::Gate, 0.5), (ExpertMatrix::Up, 0.25)] {
        let slice = slice(matrix, hidden, inner);
        let (layout, packed) =
            pack(&CheckpointView::expert(WeightFormat::FP8_TENSOR, &tensors, &slice).unwrap());
        assert!(reference::decode(&layout, &packed).iter().all(|&w| w == value));
    }
}

#[test]
fn scales_that_are_not_numbers_and_missing_parts_are_refused() {
    let codes = vec![0x22u8; 32 * 32];
    let mut scales = vec![127u8; 32 * 2];
    scales[7 * 2 + 1] = 255;
    let weight = ("w2_weight", Tensor { dtype: Dtype::U8, shape: &[32, 32], bytes: &codes });
    let scale = ("w2_weight_scale", Tensor { dtype: Dtype::U8, shape: &[32, 2], bytes: &scales });
    let slice = slice(ExpertMatrix::Down, 32, 64);
    let view = CheckpointView::expert(WeightFormat::MXFP4, &[weight, scale], &slice).unwrap();
    let layout = view.layout().unwrap();
    let mut packed = vec![0; layout.bytes()];
    assert_eq!(
        pack_panels(&view, &layout, 0..1, &mut packed, 1),
        Err(PackError::NotFinite { part: "scale", row: 7, col: 1 })
    );
    let missing = CheckpointView::expert(WeightFormat::MXFP4, &[weight], &slice).err().unwrap().to_string();
    assert!(missing.contains("w2_weight_scale"), "{missing}");
    let wrong =
        CheckpointView::expert(WeightFormat::NVFP4, &[weight, scale], &slice).err().unwrap().to_string();
    assert!(wrong.contains("e4m3") && wrong.contains("[32, 2]"), "{wrong}");
}

#[test]
fn code_tables_are_the_published_ones() {
    let tables: serde_json::Value = serde_json::from_slice(&golden("code_tables.json")).unwrap();
    let check = |name: &str, decode: &dyn Fn(u8) -> f32| {
        for (i, bits) in tables[name].as_array().unwrap().iter().enumerate() {
            let expected = f32::from_bits(u32::from_str_radix(bits.as_str().unwrap(), 16).unwrap());
            assert!(same(decode(i as u8), expected, 0), "{name} {i:#x}");
        }
    };
    check("e4m3fn", &code::e4m3_to_f32);
    check("e8m0", &code::e8m0_to_f32);
    check("e2m1", &code::e2m1_to_f32);
    let words: serde_json::Value = serde_json::from_slice(&golden("bf16_fp16.json")).unwrap();
    for (name, kind) in [("bf16", lk_core::format::CodeKind::Bf16), ("fp16", lk_core::format::CodeKind::F16)]
    {
        let column = |c: &str| words[name][c].as_array().unwrap().clone();
        for (hex, bits) in column("hex").iter().zip(&column("f32")) {
            let word = u32::from_str_radix(hex.as_str().unwrap(), 16).unwrap();
            let expected = u32::from_str_radix(bits.as_str().unwrap(), 16).unwrap();
            assert_eq!(code::decode_word(kind, word, 0).to_bits(), expected, "{name} {hex}");
        }
    }
}

#[test]
fn names_of_formats_are_read_back() {
    for case in cases() {
        assert_eq!(WeightFormat::parse(&case.format.to_string()).unwrap(), case.format);
    }
    assert_eq!(WeightFormat::parse("nvfp4").unwrap(), WeightFormat::NVFP4);
    for bad in ["", "int3", "u4", "bf16-g32-f32", "u4-g17-bf16", "u4-g32-f64", "e2m1-zp", "u4-g32"] {
        let text = WeightFormat::parse(bad).err().unwrap().to_string();
        assert!(text.contains("unsupported format"), "{text}");
    }
}
