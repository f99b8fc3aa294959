//! Memory: arenas on NUMA nodes, lazily committed buffers, aligned scratch.
#![expect(unsafe_code, reason = "memory mappings and slices of them")]

mod aligned;
mod arena;
mod bind;
mod interleave;
mod lazy;
mod locality;
mod mapping;

pub(crate) use aligned::sealed::Scalar;
pub use aligned::{AlignedVec, SCRATCH_ALIGN_BYTES};
pub use arena::{ArenaClaim, NodeArena, SealedArena};
pub use bind::{
    BindCall, BindOutcome, LinuxCalls, MemBinder, NullBinder, PageCounts, PolicyCalls, RecordingBinder,
    SyscallBinder, default_binder, numa_maps_counts,
};
pub use interleave::ThreadInterleave;
pub use lazy::LazyBuffer;
pub use locality::{LocalityReport, locality};
pub use mapping::HUGE_PAGE_BYTES;
