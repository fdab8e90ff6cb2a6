//! A machine whose built-in guest is followed line by line, under `slipgate run` or QEMU. It has one
//! vCPU, which polls its devices: what they cost is the CPU time of the other threads.

use std::{
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use slipgate_testbed::{
    Followed, MicroVm, PinDir, World,
    builtin_guest::{self, Accelerator, Boot, Device, Network, Qemu},
    cpu_time,
    world::UPLINK,
};

use crate::microvm::placement::Placement;
pub(crate) use crate::microvm::placement::is_vcpu;

/// A running machine.
pub(crate) enum GuestMachine {
    Slipgate(Box<MicroVm>),
    Qemu(Followed),
}

impl GuestMachine {
    /// Starts `slipgate run` with further flags. The guest that it boots is this tree's, whatever the
    /// binary has built in.
    pub(crate) fn slipgate(world: &World, work: &str, flags: &[&str]) -> Result<Self> {
        let image = builtin_guest::image()?.display().to_string();
        let own = ["--kernel", &image, "--cmdline", work, "--cpus", "1"];
        let flags = [&own[..], &["--uplink", UPLINK], flags].concat();
        let vm = MicroVm::start(&world.host, &PinDir::new()?, &flags)?;
        Ok(Self::Slipgate(Box::new(vm)))
    }

    /// Starts QEMU with further devices.
    pub(crate) fn qemu(world: &World, work: &str, devices: &[Device]) -> Result<Self> {
        let qemu = Qemu {
            boot: Boot {
                cpus: 1,
                ..Boot::new(&world.host, work)
            },
            accelerator: Accelerator::Kvm,
            network: Network::User,
        };
        let command = qemu.command_with(devices)?;
        Ok(Self::Qemu(Followed::start(&world.host, command)?))
    }

    /// Waits for a line of JSON that contains `part`.
    pub(crate) fn await_line(&mut self, part: &str, within: Duration) -> Result<Value> {
        match self {
            Self::Slipgate(vm) => {
                let line = vm.await_line(part, within)?;
                line.json().with_context(|| format!("{line:?} is no JSON"))
            }
            Self::Qemu(vm) => Ok(vm.await_line(part, within)?),
        }
    }

    /// Returns the process of the VMM.
    pub(crate) fn vmm_pid(&self) -> Result<u32> {
        match self {
            Self::Slipgate(vm) => vm.vmm_pid().context("the VMM has ended"),
            Self::Qemu(vm) => Ok(vm.pid()),
        }
    }

    /// Returns the CPU time of the VMM's threads whose names are chosen.
    pub(crate) fn cpu_time(&self, chosen: impl Fn(&str) -> bool) -> Result<Duration> {
        Ok(cpu_time::of_threads(self.vmm_pid()?, chosen))
    }
}

/// Pins the vCPU to the first CPU, and all else in the world's host to the last, where there are two.
/// Returns the latter's number.
pub(crate) fn place(world: &World) -> Option<usize> {
    let placement = Placement::here()?;
    placement.keep(&world.host, &AtomicBool::new(false));
    Some(placement.others())
}

/// Returns the number under a key of what a guest has said.
///
/// # Errors
/// There is none, or the guest tells of an error.
pub(crate) fn number(said: &Value, key: &str) -> Result<f64> {
    ensure!(said.get("error").is_none(), "the guest: {said}");
    let number = said[key].as_f64();
    number.with_context(|| format!("no {key} in {said}"))
}

/// Tries something again for some seconds.
pub(crate) fn in_time<T>(what: &str, mut tried: impl FnMut() -> Option<T>) -> Result<T> {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        if let Some(done) = tried() {
            return Ok(done);
        }
        ensure!(Instant::now() < until, "{what}: not in 5 s");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(test)]
#[path = "guest_machine_test.rs"]
mod tests;
