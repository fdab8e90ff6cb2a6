//! Ports of the host that lead to the guest of a user-mode engine.
//!
//! Their sockets alone bring clients in, from the host and from elsewhere: there are no programs at
//! the uplink that translate, so the engine relays every connection, and the guest sees the gateway's
//! address as the client's; or, where the engine continues a connection by a socket of a command's network
//! ([`super::inside_sockets`]), its own.
use std::{
    net::SocketAddr,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use slipgate_abi::RuleIndex;
use slipgate_ipc::{
    channel::{Channel, MAX_FDS},
    engine::{ForwardSocket, ToEngine},
};
use slipgate_policy::document::Forward;

use super::Place;
use crate::{
    config::Config,
    kernel_state::{forward_text, forward_texts, reserve},
};

/// The forwards of the guest, whose ports are held.
#[derive(Debug, Default)]
pub(super) struct Forwards(Vec<(Forward, Option<OwnedFd>)>);

impl Forwards {
    /// Takes the ports of the host.
    ///
    /// # Errors
    /// Another process has one, this user may not bind it, or its address is not the host's.
    pub(super) fn reserve(nat: &Config) -> anyhow::Result<Self> {
        let forwards = nat.forwards.iter();
        let held = forwards.map(|forward| Ok((forward.clone(), reserve(forward)?)));
        held.collect::<anyhow::Result<_>>().map(Self)
    }

    /// Passes copies of the sockets to the engine, before it begins.
    ///
    /// # Errors
    /// The engine is gone.
    pub(super) fn pass_on(
        &self,
        nat: &Config,
        place: &Place,
        channel: &Channel,
    ) -> anyhow::Result<()> {
        let first = place.policies.forwards().start;
        for some in self.0.chunks(MAX_FDS) {
            let sockets = some.iter().map(|(forward, socket)| {
                let text = forward_text(forward);
                let at = forward_texts(nat).position(|other| other == text);
                let rule = RuleIndex::new(first + at.unwrap_or(0) as u32);
                ForwardSocket {
                    socket: socket.as_ref().map(OwnedFd::as_fd),
                    vm: place.open.id,
                    vm_row: place.open.row,
                    protocol: forward.protocol,
                    host: SocketAddr::new(forward.host, forward.host_port),
                    guest_port: forward.guest_port,
                    rule,
                }
            });
            channel.send(ToEngine::<BorrowedFd<'_>>::Forwards(sockets.collect()))?;
        }
        Ok(())
    }
}
