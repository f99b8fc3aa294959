//! `lvllm._lk.Layer`.
#![expect(unsafe_code, reason = "the output tensor is written through its address")]

use std::collections::HashMap;
use std::sync::Arc;

use lk_core::Error;
use lk_core::moe::{Layer, StepInput, TensorView};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::PyLkResult;
use crate::tensor_ref::PyTensorRef;

/// One MoE layer whose experts the engine holds.
#[pyclass(frozen, name = "Layer", module = "lvllm._lk")]
pub(crate) struct PyLayer(Arc<Layer>);

impl PyLayer {
    pub(crate) fn new(layer: Arc<Layer>) -> Self {
        Self(layer)
    }

    /// The layer itself.
    #[cfg(feature = "cuda")]
    pub(crate) fn shared(&self) -> Arc<Layer> {
        Arc::clone(&self.0)
    }
}

#[pymethods]
impl PyLayer {
    /// Packs one expert; `tensors` are named as vLLM names the parameters (`w13_weight`, `w2_weight`, `w13_bias`, …).
    #[expect(clippy::needless_pass_by_value, reason = "pyo3 hands over owned maps")]
    fn load_expert(
        &self,
        py: Python<'_>,
        expert: usize,
        tensors: HashMap<String, Py<PyTensorRef>>,
    ) -> PyLkResult<()> {
        let views: Vec<(&str, TensorView<'_>)> = tensors
            .iter()
            .map(|(name, t)| {
                let t = t.get();
                (name.as_str(), TensorView { dtype: t.dtype, shape: &t.shape, bytes: t.bytes() })
            })
            .collect();
        Ok(py.detach(|| self.0.load_expert(expert, &views))?)
    }

    /// Fills every expert with valid pseudo-random codes and scales (`load_format=dummy`).
    fn fill_dummy(&self, py: Python<'_>, seed: u64) -> PyLkResult<()> {
        Ok(py.detach(|| self.0.fill_dummy(seed))?)
    }

    /// Ends intake; raises LkError naming the experts that were never loaded.
    fn seal(&self, py: Python<'_>) -> PyLkResult<()> {
        Ok(py.detach(|| self.0.seal())?)
    }

    /// Opens the layer for a new intake of all experts.
    fn reset(&self, py: Python<'_>) {
        py.detach(|| self.0.reset());
    }

    /// `output[t] = Σ_j topk_weights[t, j] · expert_{topk_ids[t, j]}(hidden_states[t])`.
    ///
    /// `hidden_states` and `output` `[T, hidden_size]` of the layer's dtype, `topk_ids` `[T, top_k]` int32 with -1
    /// for padding, `topk_weights` `[T, top_k]` f32, `expert_map` int32 from global to local ids (-1 = elsewhere).
    #[pyo3(signature = (hidden_states, topk_ids, topk_weights, output, expert_map = None))]
    fn forward(
        &self,
        py: Python<'_>,
        hidden_states: &PyTensorRef,
        topk_ids: &PyTensorRef,
        topk_weights: &PyTensorRef,
        output: &PyTensorRef,
        expert_map: Option<&PyTensorRef>,
    ) -> PyResult<()> {
        let spec = self.0.spec();
        let tokens = hidden_states.shape.first().copied().unwrap_or(0);
        let rows = [tokens, spec.hidden_size];
        for (name, tensor) in [("hidden_states", hidden_states), ("output", output)] {
            if tensor.shape != rows || tensor.dtype != spec.dtype {
                return Err(crate::error::PyLkError::from(Error::Shape(format!(
                    "{}: {name} is {} {:?}, expected {} {rows:?}",
                    spec.name, tensor.dtype, tensor.shape, spec.dtype
                )))
                .into());
            }
        }
        let ids = [tokens, spec.top_k];
        for (name, tensor) in [("topk_ids", topk_ids), ("topk_weights", topk_weights)] {
            if tensor.shape != ids {
                return Err(crate::error::PyLkError::from(Error::Shape(format!(
                    "{}: {name} is {:?}, expected {ids:?}",
                    spec.name, tensor.shape
                )))
                .into());
            }
        }
        let input = StepInput {
            hidden_states: hidden_states.bytes(),
            topk_ids: topk_ids.as_i32("topk_ids")?,
            topk_weights: topk_weights.as_f32("topk_weights")?,
            expert_map: expert_map.map(|m| m.as_i32("expert_map")).transpose()?,
        };
        // SAFETY: the caller passes an output that nothing else reads or writes during the call, and that does not
        // overlap the inputs; the GIL is released, but the tensors stay alive through the borrowed refs.
        let out = unsafe { output.bytes_mut() };
        py.detach(|| self.0.forward(&input, out)).map_err(crate::error::PyLkError::from)?;
        Ok(())
    }

    /// Bytes of packed experts.
    #[getter]
    fn bytes(&self) -> usize {
        self.0.bytes_per_node().iter().sum()
    }

    /// Bytes of packed experts on each node of the engine's plan.
    #[getter]
    fn bytes_per_node(&self) -> Vec<usize> {
        self.0.bytes_per_node()
    }

    /// Share of a sample of the packed pages that lies on the node that computes them; None where it can't be told.
    fn local_share(&self, py: Python<'_>) -> Option<f64> {
        py.detach(|| self.0.locality().local_share())
    }

    /// Name of the layer.
    #[getter]
    fn name(&self) -> &str {
        &self.0.spec().name
    }

    /// Kernels in use: `{"w13": {rows: name}, "w2": {rows: name}}`.
    fn kernels<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let out = PyDict::new(py);
        for (matrix, names) in self.0.kernel_names() {
            let entry = PyDict::new(py);
            for (rows, name) in names {
                entry.set_item(rows, name)?;
            }
            out.set_item(matrix, entry)?;
        }
        Ok(out)
    }

    /// Counters of this layer.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let out = PyDict::new(py);
        for (name, value) in self.0.stats().entries() {
            out.set_item(name, value)?;
        }
        Ok(out)
    }
}
