//! The layer against its definition in f64: nodes, threads, routing, activations, dtypes, biases.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;

use common::{Case, check, engine, engine_with};
use lk_core::Dtype;
use lk_core::kernel::Family;
use lk_core::moe::StepInput;

#[test]
fn one_to_four_nodes_agree_with_the_definition() {
    for nodes in [1, 2, 3, 4] {
        for workers in [1, 2, 3] {
            let engine = engine(nodes, workers, None);
            check(&engine, &Case::default());
            check(&engine, &Case { num_tokens: 37, ..Case::default() });
        }
    }
}

#[test]
fn output_bits_do_not_depend_on_the_number_of_threads() {
    let case = Case { num_tokens: 19, hidden_size: 320, intermediate_size: 192, ..Case::default() };
    let mut families = 0;
    for family in Family::ALL {
        // The measured choice may differ from engine to engine; a pinned family may not.
        let run = |workers| case.run(&engine_with(1, workers, None, Some(family.name())));
        let Ok(first) = run(1) else { continue };
        families += 1;
        for workers in [2, 3, 5, 8] {
            assert_eq!(first, run(workers).unwrap(), "{family}: {workers} workers");
        }
    }
    assert!(families > 0, "no family computes bf16 here");
}

#[test]
fn every_activation_bias_and_order() {
    let engine = engine(2, 2, None);
    for (name, gated) in [
        ("silu", true),
        ("gelu", true),
        ("gelu_tanh", true),
        ("swigluoai", true),
        ("swigluoai_uninterleave", true),
        ("swiglustep", true),
        ("situ", true),
        ("relu2", true),
        ("relu2", false),
        ("silu", false),
        ("gelu", false),
    ] {
        for limit in [None, Some(0.5)] {
            if limit.is_none() && name == "swiglustep" {
                continue;
            }
            for bias in [false, true] {
                let case = Case {
                    activation: name,
                    gated,
                    limit,
                    interleaved: name == "swigluoai",
                    bias,
                    num_tokens: 5,
                    ..Case::default()
                };
                check(&engine, &case);
            }
        }
    }
}

#[test]
fn widths_that_are_not_multiples_of_anything() {
    let engine = engine(2, 2, None);
    for (hidden_size, intermediate_size) in [(16, 16), (48, 80), (320, 96), (130, 72), (2880 / 8, 704 / 4)] {
        for num_tokens in [1, 2, 3, 17, 70] {
            check(&engine, &Case { hidden_size, intermediate_size, num_tokens, ..Case::default() });
        }
    }
}

#[test]
fn every_dtype_of_activations_and_weights() {
    let engine = engine(1, 2, None);
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        for format in ["f32", "bf16", "f16"] {
            for num_tokens in [1, 4, 40] {
                check(&engine, &Case { format, dtype, num_tokens, ..Case::default() });
            }
        }
    }
}

#[test]
fn router_weight_on_the_input() {
    let engine = engine(2, 1, None);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for num_tokens in [1, 33] {
            check(
                &engine,
                &Case { top_k: 1, router_weight_on_input: true, dtype, num_tokens, ..Case::default() },
            );
        }
    }
}

#[test]
fn padding_duplicates_and_experts_held_elsewhere() {
    let engine = engine(1, 2, None);
    let case = Case { num_tokens: 3, top_k: 2, num_experts: 4, ..Case::default() };
    let (layer, reference) = case.build(&engine).unwrap();
    let x = case.hidden_states();
    let weights = [0.5, 0.25, 1.0, -0.5, 0.125, 2.0];
    for (ids, map, local) in [
        ([0, 0, -1, 3, -1, -1], None, [0, 0, -1, 3, -1, -1]),
        ([7, 5, 0, 1, 2, 3], Some([-1, 0, 1, -1, -1, 2, -1, 3]), [3, 2, -1, 0, 1, -1]),
    ] {
        let mut out = vec![0xffu8; x.len()];
        let input = StepInput {
            hidden_states: &x,
            topk_ids: &ids,
            topk_weights: &weights,
            expert_map: map.as_ref().map(|m: &[i32; 8]| m.as_slice()),
        };
        layer.forward(&input, &mut out).unwrap();
        case.compare(&out, &reference.forward(&case.decode(&x), &local, &weights, 2));
    }
}

#[test]
fn bad_calls_name_the_layer_and_the_numbers() {
    let engine = engine(1, 1, None);
    let case = Case::default();
    let (layer, _) = case.build(&engine).unwrap();
    let x = case.hidden_states();
    let mut out = vec![0u8; x.len()];
    let bad_id = [99; 2];
    let input = StepInput { hidden_states: &x, topk_ids: &bad_id, topk_weights: &[1.0; 2], expert_map: None };
    let error = layer.forward(&input, &mut out).unwrap_err().to_string();
    assert!(error.contains("topk_ids[0, 0]") && error.contains("99"), "{error}");
    let input = StepInput { hidden_states: &x, topk_ids: &[0; 3], topk_weights: &[1.0; 3], expert_map: None };
    let error = layer.forward(&input, &mut out).unwrap_err().to_string();
    assert!(error.contains("model.layers.0") && error.contains("top_k 2"), "{error}");
    layer.reset();
    assert!(layer.seal().unwrap_err().to_string().contains("never loaded"));
}

#[test]
fn not_a_number_is_refused_by_layer_expert_and_place() {
    let engine = engine(2, 1, None);
    for (format, value) in [("bf16", f32::NAN), ("f32", f32::INFINITY), ("f16", f32::NEG_INFINITY)] {
        for matrix in ["w13_weight", "w2_weight"] {
            let case = Case { format, poison: Some((matrix, 1, 40, value)), ..Case::default() };
            let error = case.build(&engine).err().expect("poisoned weights must be refused").to_string();
            for part in ["model.layers.0", "expert 1", matrix] {
                assert!(error.contains(part), "{error}");
            }
        }
    }
}
