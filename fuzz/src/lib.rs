//! The fuzz targets' code. Each function is one target: it panics if the code under test violates a
//! property, and returns otherwise.
//!
//! The programs in `targets/` pass libFuzzer's inputs to these functions. [`seeds`] are the initial
//! inputs.
mod balloon;
mod disk;
mod dns;
mod dns_proxy;
mod dress;
mod driver;
mod engine;
mod framing;
mod inspect;
mod kernel;
mod messages;
mod packet;
mod pci;
mod policy;
mod relay;
mod rules;
pub mod seeds;
mod services;
mod slaac;
mod snapshot;
mod tape;
mod tcp;
mod transport;
mod vhost_user;
mod virtio_net;
mod vms;
mod vsock;

pub use {
    balloon::balloon,
    disk::disk,
    dns::dns,
    dns_proxy::dns_proxy,
    engine::engine,
    framing::framing,
    inspect::{http, quic, reassembly, tls},
    kernel::kernel,
    messages::messages,
    packet::packet,
    pci::pci,
    policy::policy,
    relay::relay,
    rules::rules,
    services::services,
    slaac::slaac,
    snapshot::snapshot,
    tcp::tcp,
    transport::transport,
    vhost_user::vhost_user,
    virtio_net::virtio_net,
    vsock::vsock,
};
