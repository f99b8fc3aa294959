//! Host memory that the GPU reads and writes: ours, registered with the driver.
//!
//! The driver's own allocator would choose the NUMA node; ours binds first, touches, and registers then. Where registering
//! is refused (small `RLIMIT_MEMLOCK`, a sandbox) the driver's allocator is asked instead, and a note says so.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::mem::{MemBinder, NodeArena};
use crate::topology::NodeId;
use crate::{Error, Result};

use super::driver::{self, Device, DevicePtr};

/// One call registers at most this much: registering takes time by size, and a failure loses the whole call.
const CHUNK_BYTES: usize = 1 << 30;

/// Zeroed pinned memory, mapped for the device at one contiguous range.
pub(super) struct PinnedBuffer {
    device: Arc<Device>,
    source: Source,
    start: NonNull<u8>,
    device_ptr: DevicePtr,
}

enum Source {
    /// Our arena; starts of the registered chunks.
    Registered {
        _arena: NodeArena,
        chunks: Vec<*mut u8>,
    },
    Driver,
}

// SAFETY: owns its memory; the bytes are given out by nobody but `start`, whose users state their own rules.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// `bytes` bytes on `node`, and a note if that took another way than meant.
    ///
    /// # Errors
    /// The driver's refusal of both ways.
    pub(super) fn new(
        device: Arc<Device>,
        bytes: usize,
        node: NodeId,
        binder: &dyn MemBinder,
    ) -> Result<(Self, Option<String>)> {
        let entered = device.enter()?;
        let refused = match Self::register(&device, bytes, node, binder) {
            Ok(buffer) => return Ok((buffer, None)),
            Err(error) => error,
        };
        let (start, device_ptr) = driver::allocate_host(bytes).map_err(|error| match error {
            Error::Cuda { call, name, code, detail } => Error::Cuda {
                call,
                name,
                code,
                detail: format!(
                    "{detail}; {bytes} bytes of pinned memory for the hand-over are refused (before that: {refused}): \
                     raise RLIMIT_MEMLOCK (ulimit -l) or lower max_num_batched_tokens"
                ),
            },
            other => other,
        })?;
        drop(entered);
        let start = NonNull::new(start)
            .ok_or_else(|| Error::CudaUnavailable("cuMemHostAlloc returned address 0".to_owned()))?;
        // SAFETY: fresh memory of that size, nobody else has seen it.
        unsafe { std::ptr::write_bytes(start.as_ptr(), 0, bytes) };
        let note = format!(
            "hand-over slots of {:.1} MB are allocated by the CUDA driver, on a node of its choice: registering ours was \
             refused ({refused})",
            bytes as f64 / 1e6
        );
        Ok((Self { device, source: Source::Driver, start, device_ptr }, Some(note)))
    }

    fn register(device: &Arc<Device>, bytes: usize, node: NodeId, binder: &dyn MemBinder) -> Result<Self> {
        let arena = NodeArena::new(node, bytes, binder)?;
        // Touches every page, so that it lies where it was asked for before the driver pins it.
        arena.claim(0, bytes)?.fill(0);
        let start = arena.as_ptr();
        let mut buffer = Self {
            device: Arc::clone(device),
            start: NonNull::new(start).ok_or_else(|| Error::Argument("an arena at address 0".to_owned()))?,
            device_ptr: DevicePtr(0),
            source: Source::Registered { _arena: arena, chunks: Vec::new() },
        };
        for at in (0..bytes).step_by(CHUNK_BYTES) {
            // SAFETY: within the arena; `buffer` unregisters the chunk before it unmaps the arena.
            let ptr = unsafe { driver::register_host(start.wrapping_add(at), CHUNK_BYTES.min(bytes - at)) }?;
            if let Source::Registered { chunks, .. } = &mut buffer.source {
                chunks.push(start.wrapping_add(at));
            }
            if at == 0 {
                buffer.device_ptr = ptr;
            } else if ptr != buffer.device_ptr.offset(at) {
                return Err(Error::CudaUnavailable(format!(
                    "chunks of registered memory are not adjacent for the device ({:#x} after {:#x}+{at:#x})",
                    ptr.0, buffer.device_ptr.0
                )));
            }
        }
        Ok(buffer)
    }

    /// First byte for the host.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// First byte for the device.
    pub(super) fn device_ptr(&self) -> DevicePtr {
        self.device_ptr
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let _entered = self.device.enter();
        match &self.source {
            Source::Registered { chunks, .. } => chunks.iter().for_each(|&at| driver::unregister_host(at)),
            Source::Driver => driver::free_host(self.start.as_ptr()),
        }
    }
}
