//! Snapshots: the state of a paused machine in one file, its memory in another.
//!
//! # Theory of operation
//! A machine is paused at a point where no vCPU is in the guest and no worker has a request under
//! way. Then everything that the guest could tell apart is read: the vCPUs' registers, the
//! interrupt controllers and clocks of KVM, the registers of the devices, and of each queue how far
//! the device has come ([`MachineState`]). The memory is written as it is, whole; pages of zeroes
//! are left out, so the file is sparse ([`write_memory`]).
//!
//! A restored machine is made from the same configuration as any other, up to the first
//! instruction. Then the state takes the place of the state at power-on. The memory's file is
//! mapped privately: a page is read when it is first touched, and all machines restored from one
//! file share the host's page cache. What an interrupt that was under way could have told the guest
//! is told it again: every vector of a device that is active is signalled once, and so is the
//! serial port's.
//!
//! The state file is small and bounded, and has a version of its layout and a digest:
//!
//! ```text
//! 0   8 bytes   "slipsnap"
//! 8   u32       version of the layout, little-endian
//! 12  u32       length of the state, bytes, little-endian
//! 16  32 bytes  SHA-256 of the state
//! 48            the state (postcard)
//! ```
//! The digest tells of accidents, not of attacks: whoever can write the file can write any state,
//! and a state is checked as what a hostile guest writes to registers. The memory has no digest: it
//! would take longer to check than all else.
mod base;
mod error;
mod file;
mod pages;
mod state;

pub(crate) use base::Layers;
pub use base::{BaseState, MAX_BASES, MAX_RUNS, Runs, SavedFiles, SnapshotId};
pub use error::SnapshotError;
#[cfg(any(test, feature = "fake"))]
pub use file::sealed;
pub use file::{LAYOUT_VERSION, MAX_STATE_BYTES, decode, encode};
pub(crate) use pages::write_differences;
pub use pages::{PAUSE_BYTES, write_memory};
pub use state::{
    DeviceState, FilterState, FunctionState, KvmState, MachineState, Model, MsixState, NetState,
    Progress, QueueState, SerialState, TableState, TransportState, VcpuState,
};
