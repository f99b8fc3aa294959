//! Hand-over of `MoE` layers between NVIDIA GPUs and the engine.
//!
//! ```text
//! GPU stream:  … router → lk_send ─────────────── (shared experts) ───────────── lk_receive → …
//!                            │ rows, ids, weights, epoch                             ▲ rows, done
//!                            ▼              slot in pinned, mapped host memory       │
//! leader thread:   polls the epoch → Layer::forward on the slot, as worker 0 ────────┘
//! ```
//!
//! Both kernels are plain work of the caller's stream: eager steps, piecewise and full graphs are one path, and the host
//! never waits for the device. Every wait ends: a worker's panic, a refused input or a step without progress rings the done
//! flag with a status; if even the leader does not run, the GPU stops waiting by its own clock. In all cases the
//! output is zeros and [`Handover::check`] says why.
#![expect(unsafe_code, reason = "driver calls, memory shared with a device")]

mod driver;
mod handover;
mod leader;
mod mailbox;
mod nvrtc;
mod pinned;
#[cfg(test)]
mod protocol_tests;
mod slot;

pub use driver::{Device, DevicePtr, Stream};
pub use handover::{DeviceRows, Handover, HandoverOptions, Padding};
pub use leader::{Leader, LeaderOptions};
pub use mailbox::{ECHO_LAYER, MAX_LAYERS, Mailbox, SLOTS};
pub use nvrtc::{KERNELS, Nvrtc, Target, source};
pub use slot::{Slot, SlotHeader, SlotLayout};
