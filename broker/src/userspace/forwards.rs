//! Ports of the host that lead to the guest of a user-mode engine.
//!
//! Their sockets alone bring clients in, from the host and from elsewhere: there are no programs at
//! the uplink that translate, so the engine relays every connection, and the guest sees the gateway's
//! address as the client's; or, where the engine continues a connection by a socket of a command's network
//! ([`super::inside_sockets`]), its own.
//!
//! Those of the command line and of the policy file are there from the start. Clients of the API change
//! the VM's forwards as a daemon's do: the new ports are taken before anything else changes, and one that
//! goes is free again when the engine has answered.
use std::{
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use anyhow::Context as _;
use slipgate_abi::RuleIndex;
use slipgate_ipc::{
    channel::{Channel, MAX_FDS},
    engine::{ForwardSocket, ToEngine},
};
use slipgate_policy::{Described, document::Forward};

use super::Place;
use crate::{
    config::Config,
    kernel_state::{OF_ITS_VM, forward_text, forward_texts, reserve},
};

/// The forwards of the guest, whose ports are held.
#[derive(Debug, Default)]
pub(super) struct Forwards {
    /// Texts of the rules that their flows show, by the elements of `RULES`.
    texts: Vec<String>,
    held: Vec<Held>,
}

/// A port of the host that is held.
#[derive(Debug)]
struct Held {
    forward: Forward,
    /// Which of the texts its flows show.
    text: usize,
    /// `None`: it is of the guest's own address.
    socket: Option<OwnedFd>,
}

/// All forwards that there are to be. Ports that are new are held already, and every descriptor that the
/// engine gets is there.
#[derive(Debug)]
pub(super) struct ForwardChange(Vec<(Forward, Change)>);

#[derive(Debug)]
enum Change {
    /// It is there, and stays as it is.
    Kept,
    /// It is there, and leads to another port of the guest now.
    Led { for_engine: Option<OwnedFd> },
    Added {
        socket: Option<OwnedFd>,
        for_engine: Option<OwnedFd>,
    },
}

impl Forwards {
    /// Takes the ports of the host.
    ///
    /// # Errors
    /// Another process has one, this user may not bind it, or its address is not the host's.
    pub(super) fn reserve(nat: &Config) -> anyhow::Result<Self> {
        let texts = texts(nat);
        let held = nat.forwards.iter().map(|forward| {
            let text = forward_text(forward);
            Ok(Held {
                text: texts.iter().position(|it| *it == text).unwrap_or(0),
                socket: reserve(forward)?,
                forward: forward.clone(),
            })
        });
        Ok(Self {
            held: held.collect::<anyhow::Result<_>>()?,
            texts,
        })
    }

    /// Texts of the rules that flows of forwards show.
    pub(super) fn texts(&self) -> &[String] {
        &self.texts
    }

    /// The forwards, as a definition has them.
    pub(super) fn specs(&self) -> Vec<String> {
        let specs = self.held.iter().map(|held| held.forward.spec.clone());
        let mut specs: Vec<String> = specs.collect();
        // A range is several ports, and one of both families two.
        specs.dedup();
        specs
    }

    /// Determines the change to these forwards, and takes the ports that are new.
    ///
    /// # Errors
    /// As [`Forwards::reserve`], or there is no descriptor left.
    pub(super) fn reserve_change(&self, wanted: Vec<Forward>) -> anyhow::Result<ForwardChange> {
        let change = |forward: &Forward| -> anyhow::Result<Change> {
            let held = self
                .held
                .iter()
                .find(|held| key(&held.forward) == key(forward));
            let copied = |socket: &Option<OwnedFd>| {
                let copied = socket.as_ref().map(OwnedFd::try_clone).transpose();
                copied.context("copying a forward's socket")
            };
            Ok(match held {
                Some(held) if held.forward.guest_port == forward.guest_port => Change::Kept,
                Some(held) => Change::Led {
                    for_engine: copied(&held.socket)?,
                },
                None => {
                    let socket = reserve(forward)?;
                    Change::Added {
                        for_engine: copied(&socket)?,
                        socket,
                    }
                }
            })
        };
        let changed = wanted.into_iter().map(|forward| {
            let change = change(&forward)?;
            Ok((forward, change))
        });
        changed.collect::<anyhow::Result<_>>().map(ForwardChange)
    }

    /// Puts a change in force. Returns the message for the engine.
    pub(super) fn put(&mut self, id: u64, change: ForwardChange, place: &Place) -> ToEngine {
        let mut before = std::mem::take(&mut self.held);
        let mut added = Vec::new();
        let of_its_vm = self.texts.len().saturating_sub(1);
        for (forward, change) in change.0 {
            let at = before
                .iter()
                .position(|held| key(&held.forward) == key(&forward));
            let (text, socket, for_engine) = match (change, at) {
                (Change::Kept, Some(at)) => {
                    // As the new definition has it: the text may be another one.
                    let Held { text, socket, .. } = before.swap_remove(at);
                    let kept = Held {
                        forward,
                        text,
                        socket,
                    };
                    self.held.push(kept);
                    continue;
                }
                (Change::Added { socket, for_engine }, _) => (of_its_vm, socket, for_engine),
                (Change::Led { for_engine }, Some(at)) => {
                    (of_its_vm, before[at].socket.take(), for_engine)
                }
                // Nothing else changes forwards meanwhile.
                (Change::Kept | Change::Led { .. }, None) => continue,
            };
            let held = Held {
                forward,
                text,
                socket,
            };
            added.push(held.for_engine(for_engine, place));
            self.held.push(held);
        }
        let removed = before.into_iter().map(|Held { forward, .. }| {
            let host = SocketAddr::new(forward.host, forward.host_port);
            (forward.protocol, host)
        });
        ToEngine::ChangeForwards {
            id,
            vm: place.open.id,
            row: place.open.row,
            removed: removed.collect(),
            added,
        }
    }

    /// Passes copies of the sockets to the engine, before it begins.
    ///
    /// # Errors
    /// The engine is gone.
    pub(super) fn pass_on(&self, place: &Place, channel: &Channel) -> anyhow::Result<()> {
        for some in self.held.chunks(MAX_FDS) {
            let sockets = some
                .iter()
                .map(|held| held.for_engine(held.socket.as_ref().map(OwnedFd::as_fd), place));
            channel.send(ToEngine::<BorrowedFd<'_>>::Forwards(sockets.collect()))?;
        }
        Ok(())
    }
}

impl Held {
    fn for_engine<F>(&self, socket: Option<F>, place: &Place) -> ForwardSocket<F> {
        let Forward {
            protocol,
            host,
            host_port,
            guest_port,
            ..
        } = self.forward;
        ForwardSocket {
            socket,
            vm: place.open.id,
            vm_row: place.open.row,
            protocol,
            host: SocketAddr::new(host, host_port),
            guest_port,
            rule: RuleIndex::new(place.policies.forwards().start + self.text as u32),
        }
    }
}

/// What tells one forward from another.
fn key(forward: &Forward) -> (u8, IpAddr, u16) {
    (forward.protocol, forward.host, forward.host_port)
}

/// Texts of the rules: one for each flag, and last that of forwards which clients of the API give.
fn texts(nat: &Config) -> Vec<String> {
    forward_texts(nat).chain([OF_ITS_VM.to_owned()]).collect()
}

/// The rules of the forwards.
pub(super) fn described(nat: &Config) -> Vec<Described> {
    texts(nat).into_iter().map(Described::forward).collect()
}

#[cfg(test)]
#[path = "forwards_test.rs"]
mod tests;
