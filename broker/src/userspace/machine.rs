//! The VM of `slipgate run --mode userspace`.
//!
//! The machine is made first, as with a TAP ([`crate::run_vm`]), so that a kernel that can't be booted
//! leaves nothing behind; the guest runs once the engine serves.
//!
//! The network card is one of two kinds ([`LinkEnds`]): the engine serves its rings, in memory that VMM and
//! engine share, or the VMM passes frames to it. The VMM does so where it has to look at each frame, for
//! a limit of the card, or where its guest's memory is private: that of a snapshot is the pages of a
//! file, of which a guest has copies of those alone that it writes to. To share it, all of it would
//! have to be copied first. And it does so where its memory has a limit, that of a cgroup: pages that the
//! engine touches first would not count.
use std::{
    collections::BTreeSet,
    io::{self, Read as _},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::{
    poll::{PollFd, PollTimeout, poll},
    sys::signal::Signal,
};
use serde::Serialize;
use slipgate_ipc::{
    api::Event,
    client::MachineStatus,
    engine::{OnExit, UserspaceStart},
    vmm::VmmEnd,
};

use super::{Guest, Prepared, link::LinkEnds};
use crate::{
    config::RunConfig,
    process::MESSAGES_AT_ONCE,
    run::stop_vm,
    serve::End,
    vm::{BegunVmm, How, Images, Inherits, Report, ReportFile, Stages, Typed, Vm, micros},
    vm_changes::TiedMachine,
};

/// The machine, and how it ended.
struct Machine<F, N> {
    name: String,
    /// `None` once it has ended.
    vm: Option<Vm>,
    /// When this process began, and how long it took from there until the guest ran.
    began: Instant,
    prepared: Option<Duration>,
    stages: Option<Stages>,
    /// Reads the VM's traffic while its tables exist.
    nat_figures: Option<F>,
    nat: Option<N>,
    /// Result of the run, once it has ended.
    end: Option<anyhow::Result<End>>,
    counters: Vec<(u64, serde_json::Value)>,
    /// Where the machine says what it is and what happens to it.
    notices: UnixStream,
    told: TiedMachine,
    how: Option<(How, Option<VmmEnd>)>,
}

/// Runs one VM to its end, with the user-mode engine. `nat_figures`: as of [`crate::run_vm`].
///
/// # Errors
/// The machine can't be made, the engine can't serve it, or the end was not in order.
pub fn run_userspace_vm<N: Serialize>(
    mut config: RunConfig,
    log: &str,
    nat_figures: impl FnOnce(&Path, &str) -> Option<N>,
) -> anyhow::Result<ExitCode> {
    let began = Instant::now();
    let images = Images::open(&config.machine)?;
    let prepared = Prepared::new(config.nat.clone(), &[Signal::SIGQUIT])?;
    let begun = BegunVmm::begin(&config.bounds, log, &prepared.users, began);
    let read: Vec<_> = images.named().chain(prepared.named()).collect();
    let report = config.report.as_deref();
    let mut report = report
        .map(|path| ReportFile::open(path, &read))
        .transpose()?;
    let is_restored = config.machine.restore.is_some();
    let inherits = is_restored.then(|| Inherits::of_own(&config.nat));
    if let Some(inherits) = &inherits {
        inherits.log(&config.nat.vms[0].name);
    }
    let ran = start(&mut config, images, log, begun).and_then(|(mut vm, link, how)| {
        let notices = notices_of(&mut vm).context("preparing for notices of the machine")?;
        let mut machine = Machine {
            notices,
            told: TiedMachine::of(std::process::id()),
            name: config.nat.vms[0].name.clone(),
            vm: Some(vm),
            began,
            prepared: None,
            stages: None,
            nat_figures: Some(nat_figures),
            nat: None,
            end: None,
            counters: Vec::new(),
            how: None,
        };
        let served = prepared.serve(&mut machine, link.into(), how, log);
        match machine.how.is_some() {
            true => Ok((machine, served)),
            false => Err(machine.blame(served)),
        }
    });
    let (machine, served) = match ran {
        Ok(ran) => ran,
        Err(e) => {
            if let Some(report) = &mut report {
                report.write(&Report::<N>::not_started(&config, &e))?;
            }
            return Err(e);
        }
    };
    let name = &machine.name;
    let (how, vmm) = match (machine.how, served) {
        // What failed is what has ended the VM.
        (ended, Err(e)) => (
            How::NatFailed {
                why: format!("{e:#}"),
                leaves_flows: false,
            },
            ended.and_then(|(_, vmm)| vmm),
        ),
        (Some(ended), Ok(())) => ended,
        (None, Ok(())) => anyhow::bail!("the VM of {name} has not ended"),
    };
    let exit_code = how.exit_code();
    how.log(name);
    if let Some(report) = &mut report {
        report.write(&Report {
            name,
            tap: None,
            machine: &config.machine,
            exit_code,
            prepared_us: machine.prepared.map(micros),
            stages: machine.stages,
            first_line_us: vmm.as_ref().and_then(|end| end.first_line_us),
            ran_us: vmm.as_ref().map(|end| end.ran_us),
            inherits: inherits.as_ref(),
            restarts: vmm.as_ref().map_or(0, |end| end.restarts),
            vmm: vmm.map(|end| end.counters),
            nat: machine.nat,
            how,
        })?;
    }
    Ok(ExitCode::from(exit_code))
}

/// Makes the machine. Returns it, the engine's end of its link, and what that is.
fn start(
    config: &mut RunConfig,
    images: Images,
    log: &str,
    begun: anyhow::Result<BegunVmm>,
) -> anyhow::Result<(Vm, OwnedFd, UserspaceStart)> {
    let LinkEnds {
        ours,
        theirs,
        memory,
        how,
    } = LinkEnds::make(&config.machine, &config.bounds)?;
    let link = Some((theirs, memory));
    let mut vm = Vm::prepare(config, images, &BTreeSet::new(), link, log, begun)?;
    vm.await_made(&config.machine)?;
    Ok((vm, ours, how))
}

/// Has the machine tell what happens to it, as it tells a daemon. Returns the socket to read.
fn notices_of(vm: &mut Vm) -> io::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    theirs.set_nonblocking(true)?;
    vm.orders.notify_by(theirs);
    Ok(ours)
}

impl<F, N> Machine<F, N> {
    /// The error of a start: that of the VMM where it has ended.
    fn blame(mut self, served: anyhow::Result<()>) -> anyhow::Error {
        let error = served.err();
        let error = error.unwrap_or_else(|| anyhow::anyhow!("the guest did not run"));
        match &mut self.vm {
            Some(vm) => vm.blame(error),
            None => error,
        }
    }

    /// Handles orders to the VM and what the VMM has sent. Returns how the VM ended, or is to end.
    fn hear(&mut self) -> Option<End> {
        let counters = &mut self.counters;
        let vm = self.vm.as_mut()?;
        let heard = vm.hear(MESSAGES_AT_ONCE, |id, counted| counters.push((id, counted)));
        heard.map(End::of_vm)
    }

    /// Passes on what was typed. Returns whether the user wants out.
    fn is_quit(&mut self) -> bool {
        let Some(console) = self.vm.as_mut().map(|vm| &mut vm.console) else {
            return false;
        };
        let is_ready = console.wants().is_some_and(|(fd, flags)| {
            let mut fds = [PollFd::new(fd, flags)];
            matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
        });
        is_ready && console.turn() == Typed::Quit
    }

    fn asked(&mut self, signal: Signal) {
        self.end.get_or_insert(Ok(End::Asked {
            exit: OnExit::Detach,
            signal,
        }));
    }
}

impl<N, F: FnOnce(&Path, &str) -> Option<N>> Guest for Machine<F, N> {
    fn poll_fds(&self) -> Vec<PollFd<'_>> {
        let Some(vm) = &self.vm else {
            return Vec::new();
        };
        let mut fds: Vec<_> = vm.poll_fds().collect();
        let console = vm.console.wants();
        fds.extend(console.map(|(fd, flags)| PollFd::new(fd, flags)));
        fds
    }

    fn has_ended(&mut self) -> bool {
        if self.end.is_none() {
            self.end = self.hear().map(Ok);
        }
        if self.end.is_none() && self.is_quit() {
            self.asked(Signal::SIGINT);
        }
        self.end.is_some()
    }

    fn begin(&mut self, socket: &Path) -> anyhow::Result<()> {
        let Some(vm) = &mut self.vm else {
            return Ok(());
        };
        tracing::info!("{}, by the user-mode engine", self.name);
        self.prepared = Some(self.began.elapsed());
        self.stages = Some(vm.stages);
        vm.resets.served_by(socket, &self.name);
        if vm.go().is_err() {
            self.end = Some(Ok(End::VmmGone));
        }
        Ok(())
    }

    fn signal(&mut self, signal: Signal) -> bool {
        if signal != Signal::SIGHUP {
            self.asked(signal);
        }
        signal == Signal::SIGHUP
    }

    fn lost_engine(&mut self, how: String) {
        let error = anyhow::anyhow!("the engine {how}");
        self.end.get_or_insert(Err(error));
    }

    fn ask_counters(&mut self, id: u64) -> bool {
        let vm = self.vm.as_ref();
        vm.is_some_and(|vm| vm.vmm.ask_counters(id))
    }

    fn counters(&mut self) -> Vec<(u64, serde_json::Value)> {
        std::mem::take(&mut self.counters)
    }

    fn machine(&self) -> Option<MachineStatus> {
        self.told.status()
    }

    fn happened(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let mut bytes = [0; 4_096];
        while let Ok(n @ 1..) = self.notices.read(&mut bytes) {
            self.told.take(&self.name, &bytes[..n], &mut events);
        }
        events
    }

    fn finish(&mut self, pin_dir: &Path) {
        if self.prepared.is_none() {
            return;
        }
        let end = self.end.take().unwrap_or(Ok(End::VmmGone));
        self.how = Some(match stop_vm(&mut self.vm, end) {
            (How::NatFailed { why, .. }, end) => {
                let leaves_flows = false;
                (How::NatFailed { why, leaves_flows }, end)
            }
            ended => ended,
        });
        // Killed, if it did not stop; and the terminal is put back.
        self.vm = None;
        let read = self.nat_figures.take();
        self.nat = read.and_then(|read| read(pin_dir, &self.name));
    }
}
