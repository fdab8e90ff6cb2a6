//! `slipgate doctor`: features of this machine that the hybrid NAT needs, and advice on missing
//! ones. Runs as any user; facts that only root can see are reported as unknown, not missing.
mod host_nat;
#[cfg(target_arch = "x86_64")]
mod jail;
mod places;
mod user_mode;

#[cfg(target_arch = "x86_64")]
use std::os::fd::OwnedFd;
use std::{fmt::Display, fs, net::SocketAddr, path::Path, process::ExitCode};

use serde::Serialize;
use slipgate_abi::portframe::PORT_DEVICE;
#[cfg(target_arch = "x86_64")]
use slipgate_broker::host::kvm::{self, KvmUnavailable};
use slipgate_broker::host::{self, hybrid, offers_tso};
use slipgate_control::{
    Network, NetworkWatch, ReadOnlyMaps, Sizes, host::HostFacts, object, probe,
};
use slipgate_policy::parse_resolv_conf;

use self::host_nat::Planned;
#[cfg(target_arch = "x86_64")]
use crate::role::vmm;
use crate::{args::DoctorArgs, brokers, show};

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

/// Runs `slipgate doctor`. 0: everything needed is there.
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let planned = Planned::parse(args)?;
    let statuses = host_nat::ask_brokers(&args.pin_dir);
    let mut findings = examine(args.uplink.as_deref(), |facts, network, uplink| {
        host_nat::found(&planned, &statuses, facts, (network, uplink))
    });
    findings.push(attached(&args.pin_dir));
    findings.extend(room_found(&args.pin_dir));
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
    findings.extend(vmm_found());
    findings.extend(user_mode::found());
    let facts = HostFacts::read();
    findings.extend(network_found(uplink, |network| {
        host_nat(&facts, network, uplink)
    }));
    let resolv_conf = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    findings.push(resolvers_found(&parse_resolv_conf(&resolv_conf)));
    findings.extend(host_found(&facts));
    findings
}

/// Reports on a component that should be embedded in this binary and is not.
fn stub_found<E: Display>(what: &str, state: State, error: Option<E>) -> Option<Finding> {
    let error = error?;
    let remedy = "build it by `cargo xtask build`";
    Some(Finding::ok(what, error.to_string()).with(state, remedy))
}

/// Reports on the resolvers that answer guests' questions unless `--dns` names others.
fn resolvers_found(resolvers: &[SocketAddr]) -> Finding {
    let what = "resolver";
    let (mut usable, mut problems) = (Vec::new(), Vec::new());
    for resolver in resolvers {
        match host::resolver_problem(*resolver) {
            None => usable.push(resolver.to_string()),
            Some(problem) => problems.push(problem),
        }
    }
    if !usable.is_empty() {
        return Finding::ok(what, usable.join(", "));
    }
    let found = match problems.is_empty() {
        true => "/etc/resolv.conf names none that can be asked (those of a link, fe80::/10, can't)"
            .into(),
        false => problems.join("; "),
    };
    let remedy = "guests' questions will fail: give --dns a resolver that can be reached from here";
    Finding::ok(what, found).with(State::Note, remedy)
}

/// Reports on what only `slipgate run` needs.
#[cfg(target_arch = "x86_64")]
fn vmm_found() -> Vec<Finding> {
    let mut findings = vec![kvm_found(kvm::open().map(Into::into))];
    let guest = vmm::built_in_guest().err();
    findings.extend(stub_found("guest", State::Note, guest));
    findings.push(jail::found());
    findings
}

#[cfg(not(target_arch = "x86_64"))]
fn vmm_found() -> Vec<Finding> {
    let found = format!("not used on {}", std::env::consts::ARCH);
    vec![Finding::ok("KVM", found).with(State::Note, crate::NO_VMM)]
}

/// Reports on KVM, which only `slipgate run` needs.
#[cfg(target_arch = "x86_64")]
fn kvm_found(opened: Result<OwnedFd, KvmUnavailable>) -> Finding {
    const FOR: &str = "for `slipgate run` only";
    let what = "KVM";
    let fd = match opened {
        Ok(fd) => fd,
        Err(e) => {
            let found = format!("/dev/kvm can't be opened: {}", e.why);
            return Finding::ok(what, found).with(State::Note, format!("{FOR}: {}", e.remedy));
        }
    };
    match slipgate_vmm::kvm::check(fd) {
        Ok(checked) if checked.filters_registers => {
            Finding::ok(what, "/dev/kvm, with all that `slipgate run` needs")
        }
        Ok(_) => Finding::ok(what, "/dev/kvm, without a filter for registers").with(
            State::Note,
            "for `slipgate run` only: guests can use registers of features that they are not \
             offered; Linux 5.10 and newer keep these from them",
        ),
        Err(e) => Finding::ok(what, e.to_string()).with(State::Note, FOR),
    }
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

/// Reports whether a slipgate serves VMs here already.
fn attached(pin_dir: &Path) -> Finding {
    let what = "attached";
    let found = match brokers::paths(pin_dir).map(|paths| paths.pin_dir.try_exists()) {
        Ok(Ok(true)) => "yes: `slipgate stats` shows what",
        Ok(Ok(false)) => "nothing in this network namespace",
        Ok(Err(_)) | Err(_) => "unknown: pins are for root",
    };
    Finding::ok(what, found)
}

/// Reports how much room the maps have, where they are and can be read.
fn room_found(pin_dir: &Path) -> Option<Finding> {
    let paths = brokers::paths(pin_dir).ok()?;
    let maps = ReadOnlyMaps::open_pinned(&paths.pin_dir).ok()?;
    Some(room(
        maps.sizes(),
        maps.vms().count(),
        maps.rules_held(),
        maps.flows().count(),
    ))
}

/// `held`: elements of `RULES` that hold a rule, in force or not.
fn room(sizes: Sizes, vms: usize, held: usize, flows: usize) -> Finding {
    let found = format!(
        "{vms} of {} VMs, {held} of {} places for rules used so far, {flows} of {} flows",
        sizes.vms, sizes.rules, sizes.slots
    );
    let finding = Finding::ok("room", found);
    let nearly = |used: usize, most: u32| used >= most as usize / 8 * 7;
    let flags = match (nearly(vms, sizes.vms), nearly(flows, sizes.slots)) {
        (false, false) => return finding,
        (true, false) => "--max-vms",
        (false, true) => "--flow-table",
        (true, true) => "--max-vms and --flow-table",
    };
    let remedy = format!(
        "nearly full: give {flags} more, which takes effect when no slipgate process and no flow is \
         left here, or serve further VMs in another network namespace"
    );
    finding.with(State::Note, remedy)
}

fn network_found(
    given: Option<&str>,
    host_nat: impl FnOnce(&Network) -> Vec<Finding>,
) -> Vec<Finding> {
    let what = "uplink";
    let watch = match NetworkWatch::open() {
        Ok(watch) => watch,
        Err(e) => {
            return vec![
                Finding::ok(what, e.to_string())
                    .with(State::Missing, "give the process netlink sockets"),
            ];
        }
    };
    let network = watch.network();
    let mut findings = uplink_found(network, given);
    findings.extend(taps_found(network));
    findings.extend(host_nat(network));
    findings
}

/// Reports which VMMs can open the TAPs that are there. Engine ports are slipgate's own.
fn taps_found(network: &Network) -> impl Iterator<Item = Finding> {
    let links = network.links.values();
    let of_guests = links.filter(|link| !link.name.starts_with(PORT_DEVICE));
    let hints = host::tap_hints(of_guests).into_iter();
    hints.map(|hint| Finding::ok("TAPs", hint))
}

fn uplink_found(network: &Network, given: Option<&str>) -> Vec<Finding> {
    let what = "uplink";
    let link = match given {
        Some(name) => network.link_by_name(name),
        None => network.default_uplink(),
    };
    match (link, given) {
        (Some(link), _) if link.loopback => {
            let found = format!("{} is the loopback device, which leads nowhere", link.name);
            let remedy = "give --uplink the device that leads to the world";
            vec![Finding::ok(what, found).with(State::Missing, remedy)]
        }
        (Some(link), _) => {
            let up = if link.up { "up" } else { "down" };
            let found = format!("{}, {up}, MTU {}", link.name, link.mtu);
            let uplink = if link.up {
                Finding::ok(what, found)
            } else {
                let remedy = format!("bring it up: ip link set {} up", link.name);
                Finding::ok(what, found).with(State::Missing, remedy)
            };
            let mut findings = vec![uplink, offloads(&link.name)];
            findings.extend(host::big_tcp_problem(link).map(|problem| {
                let remedy = "of no concern to guests without IPv6";
                Finding::ok("IPv6", problem).with(State::Note, remedy)
            }));
            findings
        }
        (None, Some(name)) => vec![
            Finding::ok(what, format!("there is no device {name}")).with(
                State::Missing,
                "give --uplink a device that `ip link` shows",
            ),
        ],
        (None, None) => vec![Finding::ok(what, "no default route").with(
            State::Missing,
            "add a default route, or name the device that leads to the world with --uplink",
        )],
    }
}

/// Whether a guest's large frames leave the uplink whole.
fn offloads(device: &str) -> Finding {
    let what = "offloads";
    match offers_tso(device) {
        Ok(true) => Finding::ok(what, format!("{device} segments large frames itself")),
        Ok(false) => Finding::ok(what, format!("{device} has no TCP segmentation")).with(
            State::Note,
            format!("the kernel cuts large frames for it; try: ethtool -K {device} tso on"),
        ),
        Err(e) => Finding::ok(what, format!("{device} does not say: {e}")),
    }
}

fn host_found(facts: &HostFacts) -> Vec<Finding> {
    let forwarding = match facts.ip_forward {
        Some(true) => "on; slipgate needs none",
        Some(false) => "off; slipgate needs none",
        None => "unknown",
    };
    let mut findings = vec![Finding::ok("forwarding", forwarding)];
    let bypassed = facts.bypassed();
    if bypassed.is_empty() {
        let found = match facts.forward_chains {
            Some(_) => "no rules for forwarded packets, no IPsec",
            None => "unknown: seeing it needs CAP_NET_ADMIN",
        };
        findings.push(Finding::ok("firewall", found));
    }
    findings.extend(bypassed.into_iter().map(|warning| {
        Finding::ok("firewall", warning).with(
            State::Note,
            "say what guests may reach with --allow and --deny",
        )
    }));
    findings
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
