//! `lvllm._lk.LazyBuffer` and what the system says of memory.

use lk_core::mem::LazyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::PyLkResult;

/// Anonymous memory that costs nothing until it is written and whose pages can be given back.
#[pyclass(frozen, name = "LazyBuffer", module = "lvllm._lk")]
pub(crate) struct PyLazyBuffer(LazyBuffer);

#[pymethods]
impl PyLazyBuffer {
    #[new]
    fn new(nbytes: usize) -> PyLkResult<Self> {
        Ok(Self(LazyBuffer::new(nbytes)?))
    }

    /// Address of the first byte.
    #[getter]
    fn data_ptr(&self) -> usize {
        self.0.as_ptr() as usize
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.len()
    }

    /// Gives the whole pages inside a byte range back; their content reads as zero afterwards.
    fn release(&self, offset: usize, nbytes: usize) -> PyResult<()> {
        Ok(self.0.release(offset, nbytes).map(drop)?)
    }

    /// Bytes that are in memory now; None where the system does not say.
    fn resident_bytes(&self) -> Option<usize> {
        self.0.resident_bytes()
    }
}

/// Host memory in bytes: `total`, `available`, `usable` (with the control group's room), `cgroup_limit` (or None),
/// `nodes` {node: (total, usable)}.
#[pyfunction]
pub(crate) fn memory_limits(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let limits = lk_core::topology::memory_limits(std::path::Path::new("/"));
    let out = PyDict::new(py);
    out.set_item("total", limits.total_bytes)?;
    out.set_item("available", limits.available_bytes)?;
    out.set_item("usable", limits.usable_bytes())?;
    out.set_item("cgroup_limit", limits.cgroup_limit_bytes)?;
    let nodes = PyDict::new(py);
    for node in &limits.nodes {
        nodes.set_item(node.node.0, (node.total_bytes, node.usable_bytes()))?;
    }
    out.set_item("nodes", nodes)?;
    Ok(out)
}
