//! `slipgate doctor`: features of this machine that the hybrid NAT needs, and advice on missing
//! ones. Runs as any user; facts that only root can see are reported as unknown, not missing.
mod host_nat;
#[cfg(target_arch = "x86_64")]
mod jail;
mod machines;
mod network;
mod places;
mod served;
mod user_mode;

use std::{fmt::Display, process::ExitCode};

use serde::Serialize;
use slipgate_broker::host::hybrid;
use slipgate_control::{Network, host::HostFacts, object, probe};

use self::host_nat::Planned;
use crate::{args::DoctorArgs, show};

/// Runs `slipgate doctor`. 0: everything needed is there.
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let planned = Planned::parse(args)?;
    let statuses = host_nat::ask_brokers(&args.pin_dir);
    let mut findings = examine(args.uplink.as_deref(), |facts, network, uplink| {
        host_nat::found(&planned, &statuses, facts, (network, uplink))
    });
    findings.extend(served::found(&args.pin_dir));
    findings.extend(places::found(&args.pin_dir));
    let missing = findings.iter().any(|f| f.state == State::Missing);
    if args.json {
        show::print_once(&format!("{}\n", serde_json::to_string_pretty(&findings)?))?;
    } else {
        show::print_once(&report(&findings))?;
    }
    Ok(if missing {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Result of one check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
struct Finding {
    what: String,
    /// Shown as ok, missing or note.
    state: State,
    found: String,
    /// Advice, where an action is needed.
    remedy: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Missing,
    Note,
}

impl Finding {
    fn ok(what: &str, found: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            state: State::Ok,
            found: found.into(),
            remedy: None,
        }
    }

    fn with(self, state: State, remedy: impl Into<String>) -> Self {
        Self {
            state,
            remedy: Some(remedy.into()),
            ..self
        }
    }
}

/// `host_nat`: reports on the host's own NAT.
fn examine(
    uplink: Option<&str>,
    host_nat: impl FnOnce(&HostFacts, &Network, Option<&str>) -> Vec<Finding>,
) -> Vec<Finding> {
    let mut findings = vec![capabilities()];
    let privileged = findings[0].state == State::Ok;
    findings.extend(probe::checks().into_iter().map(|check| {
        let finding = Finding::ok(check.name, check.found);
        match check.remedy {
            // What was tried needs what is missing already.
            Some(_) if !privileged && is_refusal(&finding.found) => finding.with(
                State::Note,
                "unknown: run `slipgate doctor` as root to find out",
            ),
            Some(remedy) if check.optional => finding.with(State::Note, remedy),
            Some(remedy) => finding.with(State::Missing, remedy),
            None => finding,
        }
    }));
    findings.extend(stub_found(
        "BPF programs",
        State::Missing,
        object::bytes(false).err(),
    ));
    // `cargo xtask run` leaves them out.
    findings.extend(stub_found(
        "BPF programs of --bpf-log",
        State::Note,
        object::bytes(true).err(),
    ));
    findings.extend(machines::found());
    findings.extend(user_mode::found());
    let facts = HostFacts::read();
    findings.extend(network::found(uplink, &facts, |network| {
        host_nat(&facts, network, uplink)
    }));
    findings
}

/// Reports on a component that should be embedded in this binary and is not.
fn stub_found<E: Display>(what: &str, state: State, error: Option<E>) -> Option<Finding> {
    let error = error?;
    let remedy = "build it by `cargo xtask build`";
    Some(Finding::ok(what, error.to_string()).with(state, remedy))
}

/// EPERM and EACCES, as the standard library shows them.
fn is_refusal(found: &str) -> bool {
    [libc::EPERM, libc::EACCES]
        .iter()
        .any(|errno| found.ends_with(&format!("(os error {errno})")))
}

fn capabilities() -> Finding {
    let (has, lacks) = hybrid::capabilities();
    if lacks.is_empty() {
        return Finding::ok("capabilities", has.join(", "));
    }
    Finding::ok("capabilities", format!("no {}", lacks.join(", "))).with(
        State::Missing,
        "run as root: pins and locks are in directories of root's",
    )
}

fn report(findings: &[Finding]) -> String {
    let width = findings.iter().map(|f| f.what.len()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in findings {
        let mark = match finding.state {
            State::Ok => "ok     ",
            State::Missing => "MISSING",
            State::Note => "note   ",
        };
        text.push_str(&format!(
            "{mark}  {:width$}  {}\n",
            finding.what, finding.found
        ));
        if let Some(remedy) = &finding.remedy {
            text.push_str(&format!("{:9}{:width$}  -> {remedy}\n", "", ""));
        }
    }
    let is = |what, state| move |f: &Finding| f.what == what && f.state == state;
    let lacks_hybrid = findings.iter().any(|f| f.state == State::Missing);
    let has_user_mode = findings.iter().any(is(user_mode::WHAT, State::Ok));
    text.push_str(match (lacks_hybrid, has_user_mode) {
        (false, _) => "\nThe hybrid NAT can run here.\n",
        (true, false) => "\nThe hybrid NAT can't run here yet: see what is MISSING.\n",
        (true, true) => {
            "\nThe hybrid NAT can't run here yet: see what is MISSING. User mode can: `slipgate run` goes \
             on in it by itself.\n"
        }
    });
    text
}

#[cfg(test)]
#[path = "doctor_test.rs"]
mod tests;
