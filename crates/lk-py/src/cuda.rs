//! `lvllm._lk.Handover`.

use std::path::PathBuf;

use lk_core::cuda::{DevicePtr, DeviceRows, Handover, HandoverOptions, Padding, Stream};
use lk_core::engine::Engine;
use lk_core::{Dtype, Error};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::PyLkResult;
use crate::layer::PyLayer;

/// Sends rows of a GPU stream to the engine and brings the results back, without a wait on the host.
#[pyclass(frozen, name = "Handover", module = "lvllm._lk")]
pub(crate) struct PyHandover(Handover);

impl PyHandover {
    pub(crate) fn attach(
        engine: &Engine,
        device: u32,
        capacity_tokens: usize,
        max_hidden_size: usize,
        max_top_k: usize,
        dtype: &str,
        cache_dir: Option<PathBuf>,
        nvrtc_dirs: Vec<PathBuf>,
        bytes_per_block: Option<usize>,
        max_blocks: Option<u32>,
    ) -> Result<Self, Error> {
        let dtype =
            Dtype::parse(dtype).ok_or_else(|| Error::Argument(format!("dtype {dtype}: f32, bf16 or f16")))?;
        let options = HandoverOptions {
            device,
            capacity_tokens,
            max_row_bytes: max_hidden_size * dtype.bytes(),
            max_top_k,
            cache: cache_dir,
            nvrtc_folders: nvrtc_dirs,
            bytes_per_block: bytes_per_block.unwrap_or(HandoverOptions::BYTES_PER_BLOCK),
            max_blocks: max_blocks.unwrap_or(HandoverOptions::MAX_BLOCKS),
            leader: None,
        };
        Handover::attach(engine, &options).map(Self)
    }
}

#[pymethods]
impl PyHandover {
    /// Gives a sealed layer its number for `send` and `receive`. `expert_map[global id]` is the local id or -1.
    #[pyo3(signature = (layer, expert_map = None))]
    fn add_layer(&self, layer: &PyLayer, expert_map: Option<Vec<i32>>) -> PyLkResult<u32> {
        Ok(self.0.add_layer(layer.shared(), expert_map)?)
    }

    /// Launches the copy of a step's rows to the engine; all addresses are the device's. May be captured.
    #[pyo3(signature = (layer, stream, hidden_states, topk_ids, topk_weights, rows, is_padding = 0, num_rows = 0))]
    fn send(
        &self,
        layer: u32,
        stream: usize,
        hidden_states: u64,
        topk_ids: u64,
        topk_weights: u64,
        rows: usize,
        is_padding: u64,
        num_rows: u64,
    ) -> PyLkResult<()> {
        let input = DeviceRows {
            hidden_states: DevicePtr(hidden_states),
            topk_ids: DevicePtr(topk_ids),
            topk_weights: DevicePtr(topk_weights),
            rows,
            padding: Padding { mask: DevicePtr(is_padding), num_rows: DevicePtr(num_rows) },
        };
        Ok(self.0.send(layer, Stream(stream), &input)?)
    }

    /// Launches the wait for the results of the layer's last send and their copy to `output`. May be captured.
    #[pyo3(signature = (layer, stream, output, rows, is_padding = 0, num_rows = 0))]
    fn receive(
        &self,
        layer: u32,
        stream: usize,
        output: u64,
        rows: usize,
        is_padding: u64,
        num_rows: u64,
    ) -> PyLkResult<()> {
        let padding = Padding { mask: DevicePtr(is_padding), num_rows: DevicePtr(num_rows) };
        Ok(self.0.receive(layer, Stream(stream), DevicePtr(output), rows, padding)?)
    }

    /// Raises `LkError` with the dump of the first failure; costs a few loads when there was none.
    fn check(&self) -> PyLkResult<()> {
        Ok(self.0.check()?)
    }

    /// Has the leader thread spin for the step that is about to be launched.
    fn wake(&self) {
        self.0.wake();
    }

    /// Ends the hand-over: waiting kernels return zeros, later sends raise.
    fn close(&self) {
        self.0.close();
    }

    /// Most rows of one send.
    #[getter]
    fn capacity_tokens(&self) -> usize {
        self.0.capacity_tokens()
    }

    /// `pinned_bytes`, `round_trip_us` (of the trial at the start), `notes`.
    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let out = PyDict::new(py);
        out.set_item("pinned_bytes", self.0.pinned_bytes())?;
        out.set_item("round_trip_us", self.0.round_trip().as_secs_f64() * 1e6)?;
        out.set_item("notes", self.0.notes())?;
        Ok(out)
    }

    /// Counters of the leader: `requests`, `rows`, `skipped`, `naps`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let out = PyDict::new(py);
        for (name, value) in self.0.stats() {
            out.set_item(name, value)?;
        }
        Ok(out)
    }
}
