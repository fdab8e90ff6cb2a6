//! What only `slipgate run` needs: KVM, the built-in guest, the VMM's jail.
#[cfg(target_arch = "x86_64")]
use std::os::fd::OwnedFd;

#[cfg(target_arch = "x86_64")]
use slipgate_broker::host::kvm::{self, KvmUnavailable};

use super::{Finding, State};
#[cfg(target_arch = "x86_64")]
use super::{jail, stub_found};
#[cfg(target_arch = "x86_64")]
use crate::role::vmm;

const WHAT: &str = "KVM";

/// Reports on what only `slipgate run` needs.
#[cfg(target_arch = "x86_64")]
pub(super) fn found() -> Vec<Finding> {
    let mut findings = vec![kvm_found(kvm::open().map(Into::into))];
    let guest = vmm::built_in_guest().err();
    findings.extend(stub_found("guest", State::Note, guest));
    findings.push(jail::found());
    findings
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn found() -> Vec<Finding> {
    let found = format!("not used on {}", std::env::consts::ARCH);
    vec![Finding::ok(WHAT, found).with(State::Note, crate::NO_VMM)]
}

/// Reports on KVM, which only `slipgate run` needs.
#[cfg(target_arch = "x86_64")]
fn kvm_found(opened: Result<OwnedFd, KvmUnavailable>) -> Finding {
    const FOR: &str = "for `slipgate run` only";
    let fd = match opened {
        Ok(fd) => fd,
        Err(e) => {
            let found = format!("/dev/kvm can't be opened: {}", e.why);
            return Finding::ok(WHAT, found).with(State::Note, format!("{FOR}: {}", e.remedy));
        }
    };
    match slipgate_vmm::kvm::check(fd) {
        Ok(checked) => usable(checked.filters_registers),
        Err(e) => Finding::ok(WHAT, e.to_string()).with(State::Note, FOR),
    }
}

/// Reports on a KVM that has all that a machine needs.
#[cfg(target_arch = "x86_64")]
fn usable(filters_registers: bool) -> Finding {
    match filters_registers {
        true => Finding::ok(WHAT, "/dev/kvm, with all that `slipgate run` needs"),
        false => Finding::ok(WHAT, "/dev/kvm, without a filter for registers").with(
            State::Note,
            "for `slipgate run` only: guests can use registers of features that they are not \
             offered; Linux 5.10 and newer keep these from them",
        ),
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
#[path = "machines_test.rs"]
mod tests;
