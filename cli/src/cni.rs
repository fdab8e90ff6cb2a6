//! `slipgate cni`: a CNI plugin (version 1.1 of the specification) for runtimes of microVMs.
//!
//! An attachment (container and interface) is a TAP and a VM of the daemon. Both are made in the
//! network namespace that the daemon serves ([`place`]), under names that follow from the
//! attachment, so that the plugin keeps nothing itself: what is there, the daemon knows.
//!
//! The command and the attachment come by the environment, the configuration by stdin
//! ([`request`]). The result, or an error, goes to stdout as JSON ([`answer`]).
mod answer;
mod kata;
mod place;
mod request;

use std::{collections::BTreeSet, process::ExitCode};

use serde_json::{Value, json};
use slipgate_control::guest_tap::PersistentTap;
use slipgate_ipc::client::{
    ClientAnswer, ClientRequest, Replaces, VmDefinition, VmState, VmStatus,
};

use self::{
    answer::{Address, Failure, SUPPORTED, code},
    place::Place,
    request::{Attachment, Command, Request},
};

/// Label of the VMs of a network, which GC looks at.
const NETWORK_LABEL: &str = "cni.network";

/// Whether a runtime has started this program as a plugin: by its name alone.
pub(crate) fn is_asked() -> bool {
    std::env::args_os().len() == 1 && std::env::var_os(request::COMMAND).is_some()
}

/// Carries out the command of the environment.
pub(crate) fn run() -> ExitCode {
    let (version, done) = match Request::read() {
        Ok(request) => (request.config.cni_version.clone(), perform(&request)),
        Err((version, failure)) => (version, Err(failure)),
    };
    let (said, code) = match done {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(result)) => (result, ExitCode::SUCCESS),
        Err(failure) => (failure.to_json(&version), ExitCode::FAILURE),
    };
    println!("{said:#}");
    code
}

fn perform(request: &Request) -> Result<Option<Value>, Failure> {
    match &request.command {
        Command::Version => Ok(Some(json!({
            "cniVersion": request.config.cni_version,
            "supportedVersions": SUPPORTED,
        }))),
        Command::Add(attachment) => add(request, attachment).map(Some),
        Command::Del(attachment) => del(request, attachment).map(|()| None),
        Command::Check(attachment) => check(request, attachment).map(|()| None),
        Command::Gc => gc(request).map(|()| None),
        Command::Status => place::find(request).map(|_| None).map_err(|failure| {
            let code = match failure.code {
                // Established flows go on in the kernel, nothing new gets in.
                code::TRY_AGAIN => code::LIMITED,
                _ => code::UNAVAILABLE,
            };
            Failure { code, ..failure }
        }),
    }
}

/// Makes the TAP and has the daemon serve it.
fn add(request: &Request, attachment: &Attachment) -> Result<Value, Failure> {
    let place = place::find(request)?;
    let sandbox = place.path()?;
    let config = &request.config;
    let tap = attachment.tap(config.network()?);
    let made = PersistentTap {
        name: &tap,
        // root, and who may administer the network.
        user: Some(attachment.args.user.or(config.user).unwrap_or(0)),
        group: attachment.args.group.or(config.group),
        is_multi_queue: config.multi_queue,
        mtu: config.mtu.or(place.network.mtu),
    };
    made.make().map_err(|e| match e {
        slipgate_control::Error::DeviceExists(_) => Failure::new(
            code::EXISTS,
            format!("the TAP {tap} of this attachment is there: DEL comes before another ADD"),
        ),
        e => Failure::new(code::IO, format!("making the TAP {tap}")).because(&e),
    })?;
    let done = serve(request, attachment, &place, &tap).and_then(|address| {
        let sandbox = sandbox.to_string_lossy();
        if let Some(folder) = &config.kata_dan {
            kata::add(folder, attachment, &address, &sandbox, config.multi_queue)?;
        }
        // containerd looks for the interface by the name that it gave.
        let name = match &config.kata_dan {
            Some(_) => &attachment.ifname,
            None => &address.tap,
        };
        Ok(address.to_result(&config.cni_version, name, &attachment.container, &sandbox))
    });
    done.inspect_err(|failure| {
        // What went wrong is the first error. A VM that was there is another's.
        let _ = match failure.code {
            code::EXISTS => remove_tap(&tap),
            _ => remove(request, attachment, &place.pin_dir).map(drop),
        };
    })
}

/// Adds the VM, and returns what its guest is to be told.
fn serve(
    request: &Request,
    attachment: &Attachment,
    place: &Place,
    tap: &str,
) -> Result<Address, Failure> {
    let config = &request.config;
    let network = config.network()?;
    let mut labels = config.labels.clone();
    labels.extend(attachment.args.labels.clone());
    labels.insert(NETWORK_LABEL.into(), request::short(network));
    let enforced_mac = attachment.mac(config);
    let (policy, inline_policy) = config.policy()?;
    let definition = VmDefinition {
        mac: enforced_mac.clone(),
        ip: attachment.ip(config)?,
        policy,
        inline_policy,
        forwards: config.forwards()?,
        uplink: config.uplink.clone(),
        host_loopback: config.host_loopback.clone(),
        quotas: config.quotas,
        labels,
        ..VmDefinition::new(attachment.vm(network), tap)
    };
    let asked = ClientRequest::PutVm {
        vm: Box::new(definition),
        // DEL comes before another ADD.
        replaces: Replaces::Nothing,
        tap: None,
    };
    let ClientAnswer::Vm { vm, .. } = place.ask(asked)? else {
        return Err(Failure::another_answer());
    };
    if vm.state == VmState::Waiting {
        let why = format!("the daemon does not see the TAP {tap} yet");
        return Err(Failure::new(code::TRY_AGAIN, why));
    }
    Ok(Address {
        tap: tap.to_owned(),
        mac: enforced_mac.unwrap_or_else(|| attachment.suggested_mac(network)),
        ip: vm.definition.ip.unwrap_or(place.network.guest),
        mtu: place.mtu_of(tap)?,
        network: place.network,
    })
}

/// Takes away whatever is left of the attachment, wherever the daemon may be.
fn del(request: &Request, attachment: &Attachment) -> Result<(), Failure> {
    let mut daemons = 0;
    for entered in place::each(request)? {
        let pin_dir = entered?;
        daemons += usize::from(remove(request, attachment, &pin_dir)?);
    }
    match daemons {
        0 => Err(Failure::no_daemon()),
        _ => Ok(()),
    }
}

/// The same in the present network namespace. Returns whether there is a daemon.
fn remove(
    request: &Request,
    attachment: &Attachment,
    pin_dir: &std::path::Path,
) -> Result<bool, Failure> {
    let network = request.config.network()?;
    let name = attachment.vm(network);
    let answer = place::ask(pin_dir, ClientRequest::RemoveVm { name });
    // The TAP goes whatever the daemon says: without it the guest reaches nothing.
    let tap = attachment.tap(network);
    remove_tap(&tap)?;
    if let Some(folder) = &request.config.kata_dan {
        kata::remove(folder, attachment)?;
    }
    Ok(answer?.is_some())
}

fn remove_tap(name: &str) -> Result<(), Failure> {
    PersistentTap::remove(name)
        .map(drop)
        .map_err(|e| Failure::new(code::IO, format!("removing the TAP {name}")).because(&e))
}

/// Compares what there is with the result of ADD.
fn check(request: &Request, attachment: &Attachment) -> Result<(), Failure> {
    let place = place::find(request)?;
    let network = request.config.network()?;
    let (name, tap) = (attachment.vm(network), attachment.tap(network));
    let differs = |why: String| Err(Failure::new(code::DIFFERS, why));
    let vms = place.vms()?;
    let Some(vm) = vms.iter().find(|vm| vm.definition.name == name) else {
        return differs(format!("the daemon has no VM {name}"));
    };
    if vm.definition.tap != tap {
        return differs(format!(
            "{name} is on {} instead of {tap}",
            vm.definition.tap
        ));
    }
    if matches!(vm.state, VmState::Waiting | VmState::Starting) {
        return differs(format!(
            "{name} is not served: {} on {tap}",
            vm.state.name()
        ));
    }
    let Some(before) = &request.config.prev_result else {
        return Err(Failure::new(code::CONFIG, "CHECK needs prevResult"));
    };
    let has = |list: &str, key: &str, value: &str| {
        let list = before[list].as_array().into_iter().flatten();
        list.into_iter().any(|entry| entry[key] == value)
    };
    if !has("interfaces", "name", &tap) {
        return differs(format!("prevResult has no interface {tap}"));
    }
    let ip = vm.definition.ip.unwrap_or(place.network.guest);
    let address = format!("{ip}/{}", place.network.prefix_len);
    match has("ips", "address", &address) {
        true => Ok(()),
        false => differs(format!(
            "the guest has {address}, which is not in prevResult"
        )),
    }
}

/// Takes away the network's attachments that the runtime does not name.
fn gc(request: &Request) -> Result<(), Failure> {
    let place = place::find(request)?;
    let network = request.config.network()?;
    let valid = request.valid_attachments()?;
    let names: BTreeSet<String> = valid.iter().map(|valid| valid.vm(network)).collect();
    let label = request::short(network);
    let is_of_network = |vm: &&VmStatus| vm.definition.labels.get(NETWORK_LABEL) == Some(&label);
    let mut failures = Vec::new();
    for vm in place.vms()?.iter().filter(is_of_network) {
        let VmDefinition { name, tap, .. } = &vm.definition;
        if names.contains(name) {
            continue;
        }
        let removed = place.ask(ClientRequest::RemoveVm { name: name.clone() });
        let removed = removed.and_then(|_| remove_tap(tap));
        let removed = removed.and_then(|()| match &request.config.kata_dan {
            Some(folder) => kata::remove_tap(folder, tap),
            None => Ok(()),
        });
        // One that can't be removed keeps no other.
        failures.extend(removed.err());
    }
    match failures.into_iter().next() {
        None => Ok(()),
        Some(first) => Err(first),
    }
}
