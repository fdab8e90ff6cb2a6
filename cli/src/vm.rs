//! `slipgate vm`: the VMs of the daemon of this network namespace.
use std::{collections::BTreeMap, path::Path};

use anyhow::bail;
use slipgate_ipc::client::{ClientAnswer, ClientRequest, VmChange, VmDefinition, VmStatus};

use crate::{
    args::{VmCommand, VmListArgs, VmPutArgs, VmRemoveArgs},
    brokers::{ANOTHER_ANSWER, ask_daemon, no_such_vm},
    show::table::table,
};

/// Runs one of the commands.
pub(crate) fn run(command: &VmCommand) -> anyhow::Result<()> {
    match command {
        VmCommand::Add(args) => add(args),
        VmCommand::Set(args) => set(args),
        VmCommand::Rm(args) => remove(args),
        VmCommand::Ls(args) => list(args),
    }
}

fn vms(pin_dir: &Path) -> anyhow::Result<Vec<VmStatus>> {
    match ask_daemon(pin_dir, ClientRequest::ListVms)? {
        ClientAnswer::VmList { vms } => Ok(vms),
        _ => bail!(ANOTHER_ANSWER),
    }
}

fn add(args: &VmPutArgs) -> anyhow::Result<()> {
    let new = VmDefinition {
        name: args.name.clone(),
        tap: args.name.clone(),
        mac: None,
        ip: None,
        policy: None,
        quotas: Default::default(),
        forwards: Vec::new(),
        idle_after: None,
        labels: BTreeMap::new(),
        tied: false,
    };
    put(args, given(args, new), None)
}

fn set(args: &VmPutArgs) -> anyhow::Result<()> {
    let served = vms(&args.pin_dir)?;
    let Some(vm) = served.iter().find(|vm| vm.definition.name == args.name) else {
        let names = served.into_iter().map(|vm| vm.definition.name);
        return Err(no_such_vm(&args.name, names.collect()));
    };
    let now = vm.generation;
    put(args, given(args, vm.definition.clone()), Some(now))
}

/// Returns a definition with the values of the flags in place of its own.
fn given(args: &VmPutArgs, mut vm: VmDefinition) -> VmDefinition {
    if let Some(tap) = &args.tap {
        vm.tap = tap.clone();
    }
    vm.mac = args.mac.clone().or(vm.mac);
    vm.ip = args.ip.or(vm.ip);
    vm.policy = args.policy.clone().or(vm.policy);
    if !args.forward.is_empty() || args.no_forward {
        vm.forwards = args.forward.clone();
    }
    vm.idle_after = args.idle_after.or(vm.idle_after);
    vm.labels.extend(args.label.iter().cloned());
    vm.quotas = args.quotas.quotas().or(vm.quotas);
    vm
}

fn put(args: &VmPutArgs, vm: VmDefinition, replaces: Option<u64>) -> anyhow::Result<()> {
    let vm = Box::new(vm);
    let request = ClientRequest::PutVm { vm, replaces };
    let ClientAnswer::Vm { vm, change } = ask_daemon(&args.pin_dir, request)? else {
        bail!(ANOTHER_ANSWER);
    };
    let VmStatus {
        definition, state, ..
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
    Ok(())
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

fn list(args: &VmListArgs) -> anyhow::Result<()> {
    let vms = vms(&args.pin_dir)?;
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
            forwards,
            labels,
            ..
        } = vm.definition;
        let labels: Vec<String> = labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
        vec![
            name,
            vm.state.name().to_owned(),
            tap,
            ip.map(|ip| ip.to_string()).unwrap_or_default(),
            policy.unwrap_or_else(|| "-".to_owned()),
            forwards.join(","),
            labels.join(","),
        ]
    };
    let rows: Vec<_> = vms.into_iter().map(row).collect();
    let head = [
        "VM", "STATE", "TAP", "GUEST", "POLICY", "FORWARDS", "LABELS",
    ];
    print!("{}", table(&head, &rows, &[]));
    Ok(())
}
