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
    fn release(&self, offset: usize, nbytes: usize) -> PyLkResult<()> {
        Ok(self.0.release(offset, nbytes)?)
    }

    /// Bytes that are in memory now.
    fn resident_bytes(&self) -> PyLkResult<usize> {
        Ok(self.0.resident_bytes()?)
    }
}

/// Memory that this process may use: `available_bytes`, `cgroup_limit_bytes` (or None), `per_node` {node: free bytes}.
#[pyfunction]
pub(crate) fn memory_limits(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let limits = lk_core::topology::memory_limits();
    let out = PyDict::new(py);
    out.set_item("available_bytes", limits.available_bytes)?;
    out.set_item("cgroup_limit_bytes", limits.cgroup_limit_bytes)?;
    let nodes = PyDict::new(py);
    for (node, free) in limits.free_per_node {
        nodes.set_item(node.0, free)?;
    }
    out.set_item("free_per_node", nodes)?;
    Ok(out)
}
