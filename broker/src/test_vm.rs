//! A VM as a daemon tells of it, for tests.
use slipgate_ipc::{
    client::{VmDefinition, VmState, VmStatus},
    engine::VmId,
};

/// The status of a VM with this definition; its id is 7.
pub(crate) fn status(definition: VmDefinition, state: VmState) -> VmStatus {
    VmStatus {
        definition,
        id: VmId::new(7),
        worker: 0,
        generation: 1,
        state,
        idle: false,
        lacks_uplink: false,
        guest_ipv6: None,
        unserved_forwards: Vec::new(),
    }
}
