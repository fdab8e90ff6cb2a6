//! The engines' parts of the kernel state.
//!
//! A **worker** is an engine with what is its own: a row of `OWNERS`, with the VMs and the slots of
//! that row, and an engine port. The programs hand a VM's packets over to the port that its row
//! names, so the engines share out the VMs, and none takes a lock for a packet. A new VM goes to the
//! worker with the fewest, and stays there for as long as it is served. Rows outlive the process:
//! those of a predecessor go on as rows of this one, and where it had more of them, several become
//! one ([`Owner::take_several`]).
use std::{os::fd::OwnedFd, path::Path};

use anyhow::Context as _;
use slipgate_control::{Datapath, Owner, Users, owner::NotedTaps, tap::EnginePort, vm};
use slipgate_ipc::engine::OpenQuestion;

use super::Attached;
use crate::persisted_questions;

/// An engine's part of the kernel state.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) owner: Owner,
    pub(crate) port: EnginePort,
    /// Users that its engine runs as; `None`: this process's.
    pub(crate) users: Option<Users>,
    /// Record of its VMs' TAPs for a successor; `None` until the rows are open.
    pub(super) noted_taps: Option<NotedTaps>,
    /// Questions that a predecessor left, for its first engine.
    pub(crate) open_questions: Vec<OpenQuestion>,
}

impl Worker {
    /// Makes the engine ports. `handed_over`: descriptors of a predecessor, of which those of the
    /// ports are taken out.
    ///
    /// # Errors
    /// A port can't be made; the owners are returned with the error.
    pub(crate) fn make(
        datapath: &Datapath,
        owners: Vec<Owner>,
        handed_over: &mut Vec<OwnedFd>,
    ) -> Result<Vec<Self>, (anyhow::Error, Vec<Owner>)> {
        let vms = datapath.maps().sizes().vms;
        let ports = owners.iter().map(|owner| {
            let port = EnginePort::open_for(owner.row(), vms, handed_over)?;
            owner.set_port(datapath.maps(), port.ifindex);
            slipgate_control::Result::Ok(port)
        });
        let ports = match ports.collect::<slipgate_control::Result<Vec<_>>>() {
            Ok(ports) => ports,
            Err(e) => {
                let e = anyhow::Error::from(e).context("making the engine port");
                return Err((e, owners));
            }
        };
        let run_dir = &datapath.paths().run_dir;
        let workers = owners.into_iter().zip(ports);
        Ok(workers
            .enumerate()
            .map(|(at, (owner, port))| Self {
                open_questions: questions_of(run_dir, &owner),
                // No engine may signal another.
                users: (at > 0).then(Users::claim),
                noted_taps: None,
                owner,
                port,
            })
            .collect())
    }
}

/// Takes the questions of a predecessor, and of those whose rows moved to its row.
fn questions_of(run_dir: &Path, owner: &Owner) -> Vec<OpenQuestion> {
    let rows = owner.rows().iter();
    rows.flat_map(|row| persisted_questions::take(run_dir, *row))
        .collect()
}

impl Attached {
    /// The first row of this process, by which it is known where one is enough.
    pub(crate) fn first_row(&self) -> u32 {
        self.workers[0].owner.row()
    }

    /// All rows of this process.
    pub(crate) fn rows(&self) -> Vec<u32> {
        self.owners().map(Owner::row).collect()
    }

    /// These, and those whose contents moved to them.
    pub(crate) fn all_rows(&self) -> impl Iterator<Item = u32> {
        self.owners().flat_map(|owner| owner.rows().iter().copied())
    }

    /// All rows of this process, as its holds on them.
    pub(crate) fn owners(&self) -> impl Iterator<Item = &Owner> {
        self.workers.iter().map(|worker| &worker.owner)
    }

    /// The names of the engine ports.
    pub(crate) fn port_names(&self) -> String {
        let names = self.workers.iter().map(|worker| &*worker.port.name);
        names.collect::<Vec<_>>().join(", ")
    }

    /// Whether a predecessor had VMs or flows.
    pub(crate) fn has_adopted(&self) -> bool {
        self.owners().any(Owner::adopted)
    }

    /// Returns the worker that holds a row.
    pub(super) fn worker_of_row(&self, row: u32) -> Option<usize> {
        self.owners().position(|owner| owner.row() == row)
    }

    /// Returns the worker that a VM of this name belongs to: the one that it has, its predecessor's,
    /// or the one with the fewest VMs.
    pub(super) fn worker_for(&self, name: &str) -> usize {
        if self.workers.len() == 1 {
            return 0;
        }
        if let Some(at) = self.index_of(name) {
            return self.vms[at].worker;
        }
        let row = vm::owner_of_name(self.datapath.maps(), name);
        let counts = (0..self.workers.len()).map(|worker| self.vms.of_worker(worker));
        row.and_then(|row| self.worker_of_row(row))
            .unwrap_or_else(|| fewest(counts))
    }

    /// Attaches to the engine ports.
    pub(crate) fn serve_ports(&self) -> anyhow::Result<()> {
        self.workers.iter().try_for_each(|worker| {
            let served = worker.port.serve(&self.datapath, self.hook);
            served.with_context(|| format!("serving {}", worker.port.name))
        })
    }
}

/// Returns the index of the smallest count, the first of several.
fn fewest(counts: impl Iterator<Item = usize>) -> usize {
    let all = counts.enumerate();
    all.min_by_key(|(_, count)| *count).map_or(0, |(at, _)| at)
}

#[cfg(test)]
#[path = "workers_test.rs"]
mod tests;
