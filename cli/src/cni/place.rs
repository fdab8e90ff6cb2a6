//! The network namespace of an attachment: the one that a daemon serves. It is the configuration's
//! `netns`, or else the container's (a runtime may give all its VMs one), or else the runtime's own.
use std::{
    fs::{self, File},
    os::{fd::BorrowedFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use nix::sched::{CloneFlags, setns};
use slipgate_broker::{DAEMON_SOCKET, paths};
use slipgate_control::device::Device;
use slipgate_ipc::client::{
    ClientAnswer, ClientRequest, ErrorKind, GuestNetwork, VmStatus, ask as ask_broker,
};

use super::{
    answer::{Failure, code},
    request::Request,
};
use crate::args::DEFAULT_PIN_DIR;

/// This process's own namespace.
const OWN: &str = "/proc/self/ns/net";
/// The host's, or the container's that the runtime is in.
const FIRST: &str = "/proc/1/ns/net";
/// Where `ip netns` names them.
const NAMED: &str = "/run/netns";

/// Where a daemon serves. The process is in that namespace.
#[derive(Debug)]
pub(super) struct Place {
    /// Path of the namespace; `None`: the one that the process began in.
    given: Option<PathBuf>,
    pub(super) pin_dir: PathBuf,
    /// Addresses that the daemon gives guests by DHCP.
    pub(super) network: GuestNetwork,
}

/// Enters the namespace in which a daemon serves.
pub(super) fn find(request: &Request) -> Result<Place, Failure> {
    let given = paths_of(request);
    for (entered, given) in each(request)?.zip(given) {
        let pin_dir = entered?;
        match ask(&pin_dir, ClientRequest::GuestNetwork)? {
            Some(ClientAnswer::GuestNetwork { network }) => {
                return Ok(Place {
                    given,
                    pin_dir,
                    network,
                });
            }
            Some(_) => return Err(Failure::another_answer()),
            None => {}
        }
    }
    Err(Failure::no_daemon())
}

/// Enters each namespace that may be the one, in turn; gives `--pin-dir`. One that is gone is passed
/// over: so is what was in it.
pub(super) fn each(
    request: &Request,
) -> Result<impl Iterator<Item = Result<PathBuf, Failure>>, Failure> {
    let own = File::open(OWN)
        .map_err(|e| Failure::new(code::IO, "opening ".to_owned() + OWN).because(&e))?;
    let pin_dir = request.config.pin_dir.clone();
    let pin_dir = pin_dir.unwrap_or_else(|| DEFAULT_PIN_DIR.into());
    let all = paths_of(request).into_iter();
    Ok(all.map(move |path| {
        let failed = |e: &dyn std::error::Error| {
            let path = path.as_deref().unwrap_or(Path::new(OWN));
            let what = format!("entering the network namespace {}", path.display());
            Failure::new(code::IO, what).because(e)
        };
        let opened = match &path {
            Some(path) => File::open(path),
            None => own.try_clone(),
        };
        let namespace = opened.map_err(|e| failed(&e))?;
        setns(namespace, CloneFlags::CLONE_NEWNET).map_err(|e| failed(&e))?;
        Ok(pin_dir.clone())
    }))
}

/// Paths of the namespaces that may be the one, in order; `None`: the process's own.
fn paths_of(request: &Request) -> Vec<Option<PathBuf>> {
    match &request.config.netns {
        Some(given) => vec![Some(given.clone())],
        None => {
            let container = request.netns.clone().filter(|path| path.exists());
            container.map(Some).into_iter().chain([None]).collect()
        }
    }
}

/// Asks the daemon of the present namespace. `None`: there is none.
pub(super) fn ask(
    pin_dir: &Path,
    request: ClientRequest<BorrowedFd<'_>>,
) -> Result<Option<ClientAnswer>, Failure> {
    let found = paths(pin_dir);
    let found = found.map_err(|e| Failure::new(code::IO, "looking for the daemon").because(&e))?;
    match ask_broker(&found.run_dir.join(DAEMON_SOCKET), request) {
        Ok(ClientAnswer::Error { error, kind }) => {
            let code = match kind {
                ErrorKind::Busy => code::TRY_AGAIN,
                ErrorKind::Replaced => code::EXISTS,
                _ => code::REFUSED,
            };
            Err(Failure::new(code, error))
        }
        Ok(answer) => Ok(Some(answer)),
        Err(e) if e.is_nobodys() => Ok(None),
        Err(e) => Err(Failure::new(code::IO, "asking the daemon").because(&e)),
    }
}

impl Place {
    /// Asks the daemon that was found.
    pub(super) fn ask(
        &self,
        request: ClientRequest<BorrowedFd<'_>>,
    ) -> Result<ClientAnswer, Failure> {
        ask(&self.pin_dir, request)?.ok_or_else(Failure::no_daemon)
    }

    /// Asks the daemon for its VMs.
    pub(super) fn vms(&self) -> Result<Vec<VmStatus>, Failure> {
        match self.ask(ClientRequest::ListVms)? {
            ClientAnswer::VmList { vms, .. } => Ok(vms),
            _ => Err(Failure::another_answer()),
        }
    }

    /// MTU of a guest, L3 bytes: as DHCP tells it.
    pub(super) fn mtu_of(&self, tap: &str) -> Result<u32, Failure> {
        let of_tap = Device::named(tap).and_then(|device| device.mtu());
        let of_tap = of_tap
            .map_err(|e| Failure::new(code::IO, format!("reading the MTU of {tap}")).because(&e))?;
        Ok(self.network.mtu.map_or(of_tap, |mtu| mtu.min(of_tap)))
    }

    /// A path by which other processes find the namespace.
    pub(super) fn path(&self) -> Result<PathBuf, Failure> {
        if let Some(given) = &self.given {
            return Ok(given.clone());
        }
        let of = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
        let own = of(Path::new(OWN));
        let named = fs::read_dir(NAMED).into_iter().flatten().flatten();
        let paths = [FIRST.into()]
            .into_iter()
            .chain(named.map(|entry| entry.path()));
        let mut same = paths.filter(|path: &PathBuf| own.is_some() && of(path) == own);
        same.next().ok_or_else(|| {
            let why = "the network namespace of this process has no path that others could use: \
                       give the daemon's as `netns` in the network's configuration";
            Failure::new(code::CONFIG, why)
        })
    }
}
