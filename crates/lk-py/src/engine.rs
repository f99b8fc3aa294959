//! `lvllm._lk.Engine`.

use std::collections::HashMap;
#[cfg(feature = "cuda")]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lk_core::engine::{Binding, Engine, EngineOptions};
use lk_core::fault::Fault;
use lk_core::format::WeightFormat;
use lk_core::kernel::{Activation, ActivationParams};
use lk_core::moe::LayerSpec;
use lk_core::topology::{CpuId, NodeId};
use lk_core::{Dtype, Error};
use pyo3::prelude::*;
use pyo3::types::PyDict;

#[cfg(feature = "cuda")]
use crate::cuda::PyHandover;
use crate::error::PyLkResult;
use crate::layer::PyLayer;

/// Worker pool, kernels and scratch of one process; makes layers.
#[pyclass(frozen, name = "Engine", module = "lvllm._lk")]
pub(crate) struct PyEngine(Arc<Engine>);

#[pymethods]
impl PyEngine {
    #[new]
    #[pyo3(signature = (*, threads = None, nodes = None, binding = "cpu_core", rank = 0, world = 1, gpu_node = None,
        allowed_cpus = None, reserve_cores = 0, isa = None, kernel = None, compute = "exact", spin_us = None,
        power_saving = false, step_timeout_s = 120.0))]
    fn new(
        py: Python<'_>,
        threads: Option<usize>,
        nodes: Option<Vec<u32>>,
        binding: &str,
        rank: usize,
        world: usize,
        gpu_node: Option<u32>,
        allowed_cpus: Option<Vec<u32>>,
        reserve_cores: usize,
        isa: Option<&str>,
        kernel: Option<&str>,
        compute: &str,
        spin_us: Option<u32>,
        power_saving: bool,
        step_timeout_s: f64,
    ) -> PyLkResult<Self> {
        let step_timeout = Duration::try_from_secs_f64(step_timeout_s)
            .map_err(|e| Error::Config(format!("step_timeout_s {step_timeout_s}: {e}")))?;
        let options = EngineOptions {
            threads,
            nodes: nodes.map(|n| n.into_iter().map(NodeId).collect()),
            binding: match binding {
                "cpu_core" => Binding::CpuCore,
                "numa_node" => Binding::NumaNode,
                other => return Err(Error::Config(format!("binding {other}: cpu_core or numa_node")).into()),
            },
            rank,
            world,
            gpu_node: gpu_node.map(NodeId),
            allowed_cpus: allowed_cpus.map(|c| c.into_iter().map(CpuId).collect()),
            reserve_cores,
            isa: isa.map(str::to_owned),
            kernel: kernel.map(str::to_owned),
            compute: compute.to_owned(),
            spin_us,
            power_saving,
            step_timeout,
        };
        Ok(Self(py.detach(|| Engine::new(&options))?))
    }

    /// What the engine runs on: `isa`, `threads`, `nodes` (node, workers, cpus), `notes`.
    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let engine = &self.0;
        let out = PyDict::new(py);
        out.set_item("isa", engine.isa_name())?;
        out.set_item("threads", engine.plan().num_workers())?;
        let mut nodes = Vec::new();
        for node in &engine.plan().nodes {
            let entry = PyDict::new(py);
            entry.set_item("node", node.node.0)?;
            entry.set_item("workers", node.workers.len())?;
            let cpus: Vec<Vec<u32>> =
                node.workers.iter().map(|w| w.cpus.iter().map(|c| c.0).collect()).collect();
            entry.set_item("cpus", cpus)?;
            nodes.push(entry);
        }
        out.set_item("nodes", nodes)?;
        out.set_item("notes", engine.notes())?;
        Ok(out)
    }

    /// Makes an empty layer; load every expert, then `seal` it.
    #[pyo3(signature = (name, *, format, num_experts, hidden_size, intermediate_size, top_k, dtype, activation = "silu",
        limit = None, alpha = None, beta = None, linear_beta = None, gated = true, interleaved = false, w13_bias = false,
        w2_bias = false, router_weight_on_input = false, group_size = None, max_tokens = 0))]
    #[expect(clippy::fn_params_excessive_bools, reason = "keyword arguments of a Python call")]
    fn create_layer(
        &self,
        py: Python<'_>,
        name: String,
        format: &str,
        num_experts: usize,
        hidden_size: usize,
        intermediate_size: usize,
        top_k: usize,
        dtype: &str,
        activation: &str,
        limit: Option<f32>,
        alpha: Option<f32>,
        beta: Option<f32>,
        linear_beta: Option<f32>,
        gated: bool,
        interleaved: bool,
        w13_bias: bool,
        w2_bias: bool,
        router_weight_on_input: bool,
        group_size: Option<usize>,
        max_tokens: usize,
    ) -> PyLkResult<PyLayer> {
        let dtype = Dtype::parse(dtype)
            .ok_or_else(|| Error::Shape(format!("{name}: dtype {dtype} is not one that the engine knows")))?;
        let spec = LayerSpec {
            format: weight_format(&name, format, group_size)?,
            activation: Activation::parse(
                &if gated {
                    activation.to_owned()
                } else {
                    format!("{}_no_mul", activation.trim_end_matches("_no_mul"))
                },
                ActivationParams { limit, alpha, beta, linear_beta },
            )?,
            name,
            num_experts,
            hidden_size,
            intermediate_size,
            top_k,
            dtype,
            interleaved,
            w13_bias,
            w2_bias,
            router_weight_on_input,
        };
        // Scratch grows with the largest step; nothing is sized ahead.
        let _ = max_tokens;
        Ok(PyLayer::new(py.detach(|| self.0.create_layer(spec))?))
    }

    /// Connects the engine with a GPU: slots for steps of at most `capacity_tokens` rows, kernels, a leader thread.
    ///
    /// Raises `CudaUnavailableError` without driver, device or NVRTC (looked for in `nvrtc_dirs` too), `LkError`
    /// when the driver refuses or a trial of the connection fails.
    #[cfg(feature = "cuda")]
    #[pyo3(signature = (device, *, capacity_tokens, max_hidden_size, max_top_k, dtype, cache_dir = None,
        nvrtc_dirs = Vec::new(), bytes_per_block = None, max_blocks = None))]
    fn attach_cuda(
        &self,
        py: Python<'_>,
        device: u32,
        capacity_tokens: usize,
        max_hidden_size: usize,
        max_top_k: usize,
        dtype: &str,
        cache_dir: Option<PathBuf>,
        nvrtc_dirs: Vec<PathBuf>,
        bytes_per_block: Option<usize>,
        max_blocks: Option<u32>,
    ) -> PyLkResult<PyHandover> {
        Ok(py.detach(|| {
            PyHandover::attach(
                &self.0,
                device,
                capacity_tokens,
                max_hidden_size,
                max_top_k,
                dtype,
                cache_dir,
                nvrtc_dirs,
                bytes_per_block,
                max_blocks,
            )
        })?)
    }

    /// Has one worker fail in the next step, to see what the server then does: "panic", or "stall" for `seconds`.
    #[pyo3(signature = (worker, kind, seconds = 0.0))]
    fn inject_fault(&self, worker: usize, kind: &str, seconds: f64) -> PyLkResult<()> {
        let time =
            Duration::try_from_secs_f64(seconds).map_err(|e| Error::Argument(format!("{seconds} s: {e}")))?;
        self.0.inject_fault(
            worker,
            match kind {
                "panic" => Fault::Panic,
                "stall" => Fault::Stall(time),
                other => return Err(Error::Argument(format!("fault {other}: panic or stall")).into()),
            },
        );
        Ok(())
    }

    /// Counters since the engine's start.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let out = PyDict::new(py);
        for (name, value) in self.0.stats() {
            out.set_item(name, value)?;
        }
        Ok(out)
    }

    /// Stops and joins the workers; later calls fail.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

/// Read bandwidth in GB/s with so many threads (all allowed CPUs by default), measured for some milliseconds.
#[pyfunction]
#[pyo3(signature = (threads = None))]
pub(crate) fn read_bandwidth(py: Python<'_>, threads: Option<usize>) -> PyLkResult<f64> {
    Ok(py.detach(|| lk_core::limits::read_bandwidth(threads))?)
}

/// Names of the instruction sets of this CPU that have kernels.
#[pyfunction]
pub(crate) fn cpu_features() -> Vec<String> {
    lk_core::limits::cpu_features()
}

/// The format of a name; `group_size` belongs to formats with scales.
fn weight_format(layer: &str, format: &str, group_size: Option<usize>) -> Result<WeightFormat, Error> {
    let known = Dtype::parse(format).and_then(|dtype| WeightFormat::from_dtype(dtype).ok());
    match (known, group_size) {
        (Some(known), None) => Ok(known),
        _ => Err(Error::UnsupportedFormat(format!(
            "{layer}: weights in format {format} with group_size {group_size:?}; this version computes f32, bf16 and f16"
        ))),
    }
}

/// Measured arithmetic peaks in GFLOP/s with so many threads, by family (`f32fma`, `bf16dot`, `bf16amx`).
#[pyfunction]
#[pyo3(signature = (threads = None))]
pub(crate) fn compute_peaks(py: Python<'_>, threads: Option<usize>) -> PyLkResult<HashMap<String, f64>> {
    Ok(py.detach(|| lk_core::limits::compute_peaks(threads))?)
}
