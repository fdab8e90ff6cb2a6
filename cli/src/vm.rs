//! `slipgate vm`: the VMs of the daemon of this network namespace.
use std::{
    os::fd::{BorrowedFd, RawFd},
    path::Path,
};

use anyhow::{Context as _, bail};
use nix::fcntl::{FcntlArg, fcntl};
use slipgate_ipc::client::{
    ClientAnswer, ClientRequest, GuestIpv6Status, Replaces, Room, VmChange, VmDefinition, VmStatus,
};

use crate::{
    args::{Ipv6, VmCommand, VmListArgs, VmPutArgs, VmRemoveArgs},
    brokers::{ANOTHER_ANSWER, ask_daemon, no_such_vm},
    show::table::table,
};

/// Runs one of the commands.
pub(crate) fn run(command: &VmCommand) -> anyhow::Result<()> {
    match command {
        VmCommand::Add(args) => add(args),
        VmCommand::Set(args) => set(args),
        VmCommand::Rm(args) => remove(args),
        VmCommand::Keep(args) => keep(args),
        VmCommand::Ls(args) => list(args),
    }
}

/// The VMs of the daemon, and how many more there can be.
///
/// # Errors
/// There is no daemon, or it does not answer.
pub(crate) fn vms(pin_dir: &Path) -> anyhow::Result<(Vec<VmStatus>, Room)> {
    match ask_daemon(pin_dir, ClientRequest::ListVms)? {
        ClientAnswer::VmList { vms, room, .. } => Ok((vms, room)),
        _ => bail!(ANOTHER_ANSWER),
    }
}

fn add(args: &VmPutArgs) -> anyhow::Result<()> {
    // Its TAP has its name, unless another is given.
    let new = VmDefinition::new(&args.name, &args.name);
    put(args, given(args, new)?, Replaces::Anything)
}

fn set(args: &VmPutArgs) -> anyhow::Result<()> {
    let (served, _) = vms(&args.pin_dir)?;
    let Some(vm) = served.iter().find(|vm| vm.definition.name == args.name) else {
        let names = served.into_iter().map(|vm| vm.definition.name);
        return Err(no_such_vm(&args.name, names.collect()));
    };
    let now = Replaces::AnyOf(vec![vm.definition.version()]);
    put(args, given(args, vm.definition.clone())?, now)
}

/// Returns a definition with the values of the flags in place of its own.
fn given(args: &VmPutArgs, mut vm: VmDefinition) -> anyhow::Result<VmDefinition> {
    if let Some(tap) = &args.tap {
        vm.tap = tap.clone();
    }
    vm.mac = args.mac.clone().or(vm.mac);
    vm.ip = args.ip.or(vm.ip);
    vm.ipv6 = args.ipv6.as_ref().map(Into::into).or(vm.ipv6);
    vm.ipv6_prefix = args.ipv6_prefix.clone().or(vm.ipv6_prefix);
    if let Some(Ipv6::Routed(Some(prefix))) = &args.ipv6 {
        vm.ipv6_prefix = Some(prefix.clone());
    }
    if let Some(name) = &args.policy {
        vm.policy = Some(name.clone());
        vm.inline_policy = None;
    }
    if let Some(file) = &args.policy_file {
        let text = std::fs::read_to_string(file);
        vm.inline_policy = Some(text.with_context(|| format!("reading {}", file.display()))?);
        vm.policy = None;
    }
    if !args.forward.is_empty() || args.no_forward {
        vm.forwards = args.forward.clone();
    }
    if !args.host_loopback.is_empty() || args.no_host_loopback {
        vm.host_loopback = args.host_loopback.clone();
    }
    if args.uplink.is_some() || args.no_uplink {
        vm.uplink = args.uplink.clone();
    }
    if !args.nat_address.is_empty() || args.no_nat_address {
        vm.nat_addresses = args.nat_address.clone();
    }
    vm.idle_after = args.idle_after.or(vm.idle_after);
    vm.labels.extend(args.label.iter().cloned());
    vm.quotas = args.quotas.quotas().or(vm.quotas);
    Ok(vm)
}

fn put(args: &VmPutArgs, vm: VmDefinition, replaces: Replaces) -> anyhow::Result<()> {
    let vm = Box::new(vm);
    let tap = args.tap_fd.map(passed).transpose()?;
    let request = ClientRequest::PutVm { vm, replaces, tap };
    let ClientAnswer::Vm { vm, change } = ask_daemon(&args.pin_dir, request)? else {
        bail!(ANOTHER_ANSWER);
    };
    let VmStatus {
        definition,
        state,
        lacks_uplink,
        ..
    } = *vm;
    let change = match change {
        VmChange::Created => "added",
        VmChange::Changed => "changed",
        VmChange::Unchanged => "as it was",
    };
    println!(
        "{} {change}: {} on {}",
        definition.name,
        state.name(),
        definition.tap
    );
    if lacks_uplink && let Some(uplink) = &definition.uplink {
        println!("no flow of it leaves: there is no device {uplink} yet");
    }
    Ok(())
}

/// The descriptor of this number that the command was started with.
fn passed(number: RawFd) -> anyhow::Result<BorrowedFd<'static>> {
    let flag = format!("--tap-fd {number}");
    if number < 0 {
        bail!("{flag}: give the number of a descriptor");
    }
    // SAFETY: nothing closes it before the command ends. A number that is no descriptor is answered
    // by an error.
    let passed = unsafe { BorrowedFd::borrow_raw(number) };
    let open = fcntl(passed, FcntlArg::F_GETFD);
    open.with_context(|| format!("{flag}: it is not open: let this command inherit it"))?;
    Ok(passed)
}

/// The addresses that a guest uses of its prefix, or the prefix while it uses none.
fn ipv6_of(ipv6: Option<&GuestIpv6Status>) -> String {
    let Some(ipv6) = ipv6 else {
        return "-".to_owned();
    };
    let global = ipv6.addresses.iter();
    let global = global.filter(|address| !address.is_unicast_link_local());
    let texts: Vec<String> = global.map(ToString::to_string).collect();
    match texts.is_empty() {
        true => ipv6.prefix.clone(),
        false => texts.join(","),
    }
}

fn remove(args: &VmRemoveArgs) -> anyhow::Result<()> {
    for name in &args.names {
        let request = ClientRequest::RemoveVm { name: name.clone() };
        match ask_daemon(&args.pin_dir, request)? {
            ClientAnswer::Done => println!("{name} removed"),
            ClientAnswer::UnknownVm { served } => return Err(no_such_vm(name, served)),
            _ => bail!(ANOTHER_ANSWER),
        }
    }
    Ok(())
}

fn keep(args: &VmRemoveArgs) -> anyhow::Result<()> {
    for name in &args.names {
        let request = ClientRequest::KeepVm { name: name.clone() };
        match ask_daemon(&args.pin_dir, request)? {
            ClientAnswer::Vm { change, .. } => match change {
                VmChange::Unchanged => println!("{name} is kept already"),
                _ => println!("{name} is kept"),
            },
            ClientAnswer::UnknownVm { served } => return Err(no_such_vm(name, served)),
            _ => bail!(ANOTHER_ANSWER),
        }
    }
    Ok(())
}

fn list(args: &VmListArgs) -> anyhow::Result<()> {
    let (vms, room) = vms(&args.pin_dir)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&vms)?);
        return Ok(());
    }
    let row = |vm: VmStatus| {
        let VmDefinition {
            name,
            tap,
            ip,
            policy,
            uplink,
            forwards,
            labels,
            ..
        } = vm.definition;
        let labels: Vec<String> = labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
        vec![
            name,
            vm.state.name().to_owned(),
            vm.worker.to_string(),
            tap,
            ip.map(|ip| ip.to_string()).unwrap_or_default(),
            ipv6_of(vm.guest_ipv6.as_ref()),
            policy.unwrap_or_else(|| "-".to_owned()),
            match uplink {
                Some(uplink) if vm.lacks_uplink => format!("{uplink} (absent)"),
                Some(uplink) => uplink,
                None => "-".to_owned(),
            },
            forwards.join(","),
            labels.join(","),
        ]
    };
    let rows: Vec<_> = vms.into_iter().map(row).collect();
    let head = [
        "VM", "STATE", "WORKER", "TAP", "GUEST", "IPV6", "POLICY", "UPLINK", "FORWARDS", "LABELS",
    ];
    print!("{}", table(&head, &rows, &[]));
    let Room { vms, rules } = room;
    println!(
        "{} of {} VMs; {} of {} rules",
        vms.used, vms.most, rules.used, rules.most
    );
    Ok(())
}
