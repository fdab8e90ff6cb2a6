//! The start: opens the files that flags name, then creates or joins the kernel state in order, and
//! removes it again on failure.
mod inputs;

use std::{collections::BTreeSet, time::Duration};

use anyhow::Context as _;
use slipgate_control::{
    Datapath, LoadOptions, Owner, Paths, Sizes,
    netlink::{NetworkWatch, NextHops},
    owner::{self, DaemonLock},
    probe, vm,
};
use slipgate_policy::document::{PutPolicy, inline_name};

pub(crate) use self::inputs::{Inputs, listen_for_metrics};
use crate::{
    DAEMON_SOCKET,
    config::Config,
    handover::end_predecessor,
    host::{self, HostResolvers},
    kernel_state::{
        Attached, Budgets, Catalogue, Domains, HeldForwards, HookPlaces, HostNatWatch,
        NeighbourLinks, Pacing, ServedVms, VmUplinks, Worker, Writer, check_source, find_uplink,
        forwards_described, tap_of, warn_of_rest,
    },
    persisted_policy, persisted_vms,
    privileges::raise_file_limit,
};

/// Time limit for a daemon from which this one takes over to end: its engine may have records to
/// write.
const PREDECESSOR_ENDS_WITHIN: Duration = Duration::from_secs(90);

/// Loads or joins, takes an owner's row, makes the port, opens the VMs' rows, attaches to the
/// port and the uplink. TAPs are not served yet: that waits for the engine.
pub(crate) fn attach(mut config: Config, inputs: Inputs) -> anyhow::Result<Attached> {
    let Inputs {
        mut loaded,
        mut policies,
        flow_log,
        pcap,
        metrics,
        api,
        users,
        mut handed_over,
    } = inputs;
    if let Err(e) = raise_file_limit() {
        tracing::warn!("raising the limit of open files: {e}");
    }
    let watch = NetworkWatch::open()?;
    if !config.is_daemon {
        for vm in &config.vms {
            tap_of(vm, watch.network())?;
        }
    }
    let uplink = find_uplink(&config, watch.network())?;
    check_source(&config, &uplink, watch.network())?;
    let paths: Paths = crate::paths(&config.pin_dir)?;
    let serves = paths.pin_dir.exists();
    let at = (&*uplink.name, uplink.ifindex);
    let mut host_nat = HostNatWatch::open();
    let met = host::check_tuples(&config, host_nat.facts(), at, watch.network(), serves)?;
    host_nat.has_told(met);
    if config.wants_ipv6()
        && let Some(link) = watch.network().link_by_name(&uplink.name)
        && let Some(problem) = host::big_tcp_problem(link)
    {
        tracing::warn!("{problem}");
    }
    let datapath = Datapath::open(&LoadOptions {
        paths: paths.clone(),
        sizes: config.sizes(),
        bpf_log: config.bpf_log,
        ipv6: config.may_have_ipv6(),
    })
    .context("loading the programs")?;
    if datapath.joined() {
        warn_of_sizes(config.sizes(), datapath.maps().sizes());
    }
    let daemon = match config.is_daemon {
        true => {
            let patience = match config.takes_over {
                true => {
                    // What may fail for the host's reasons has not: from here on the flows are ours.
                    end_predecessor(&paths.run_dir.join(DAEMON_SOCKET))?;
                    PREDECESSOR_ENDS_WITHIN
                }
                false => owner::ENGINE_DIES_WITHIN,
            };
            let lock = DaemonLock::take(&paths, patience).context(
                "another `slipgate serve` serves this network namespace (--take-over takes over \
                 from it)",
            )?;
            let kept = persisted_vms::read(&paths.run_dir)?;
            let mut named = persisted_vms::read_policies(&paths.run_dir)?;
            let inline = kept.iter().filter_map(|vm| vm.inline_policy.clone());
            named.extend(inline.map(|text| (inline_name(&text), text)));
            if !named.is_empty() {
                for (name, text) in named {
                    let base = config.base_file.as_ref();
                    let policy = PutPolicy::parse(&name, &text, base);
                    let policy =
                        policy.with_context(|| format!("the policy {name}, which was put"))?;
                    config.named_policies.insert(name, policy);
                }
                config = config.settled()?;
                loaded = config.load_policies()?;
                policies = loaded.compile()?;
            }
            config.serve_kept(&kept)?;
            Some(lock)
        }
        false => None,
    };
    let hook = probe::best_hook();
    let names: Vec<&str> = config.vms.iter().map(|vm| vm.name.as_str()).collect();
    let owners = Owner::take_several(datapath.maps(), &paths, &names, config.workers)
        .with_context(|| match config.workers {
            1 => "taking a row of the owners' table".to_owned(),
            workers => format!("--workers {workers}: taking a row for each"),
        })?;
    let rows: Vec<u32> = owners.iter().map(Owner::row).collect();
    let adopted = owners.iter().any(Owner::adopted);
    if config.new_vms {
        // Their flows are ended by the engine.
        for row in rows
            .iter()
            .flat_map(|row| vm::rows_of(datapath.maps(), *row))
        {
            vm::retire(datapath.maps(), row);
        }
    }
    let swept = owner::sweep(datapath.maps(), &paths, &owners, owner::PATIENCE)?;
    tracing::debug!(?swept, ?rows, adopted, "took rows");
    let command_line = config.policy_flags();
    let kept = persisted_policy::path(&paths.run_dir, rows[0]);
    let mut took_over = false;
    if adopted
        && !config.new_vms
        && let Some(all) = persisted_policy::take_over(&kept, &config)?
    {
        (config, loaded, policies) = all;
        took_over = true;
    }
    let run_dirs = slipgate_control::pins::sweep_run_dirs();
    tracing::debug!("removed {run_dirs} directories of locks that dead processes left");
    // Before anything is made that a failure would have to take down.
    let catalogue = |rows: &[u32]| {
        let writer = Writer {
            maps: datapath.maps(),
            paths: datapath.paths(),
            rows,
        };
        Catalogue::begin(writer, loaded, policies, forwards_described(&config))
    };
    let made = Made::new(&datapath, &owners, catalogue).and_then(|made| {
        let taps = owners.iter().map(|owner| owner.noted_taps(&paths));
        let taps = taps.collect::<slipgate_control::Result<Vec<_>>>()?;
        Ok((taps.into_iter().flatten().collect(), made))
    });
    let undo = |datapath: Datapath, owners: Vec<Owner>| {
        if !adopted {
            warn_of_rest(datapath.remove_if_last(owners).map_err(Into::into));
        }
    };
    let (
        former_taps,
        Made {
            next_hops,
            policies,
        },
    ) = match made {
        Ok(made) => made,
        Err(e) => {
            undo(datapath, owners);
            return Err(e);
        }
    };
    let workers = match Worker::make(&datapath, owners, &mut handed_over.others()) {
        Ok(workers) => workers,
        Err((e, owners)) => {
            undo(datapath, owners);
            return Err(e);
        }
    };
    let mut attached = Attached {
        daemon,
        told_network: None,
        next_hops,
        noted_hops: None,
        has_told_of_hops: false,
        former_taps,
        vms: ServedVms::default(),
        datapath,
        workers,
        watch,
        policies,
        forwards: HeldForwards::default(),
        flow_log,
        pcap,
        metrics,
        api,
        events: Vec::new(),
        users,
        command_line,
        took_over,
        unremoved: BTreeSet::new(),
        resolvers: HostResolvers::find(),
        uplink,
        vm_uplinks: VmUplinks::default(),
        domains: Domains::default(),
        neighbour_links: NeighbourLinks::open(config.may_have_routed_prefixes()),
        hook,
        hook_places: HookPlaces::watch(),
        host_nat,
        handed_over,
        guards_due: BTreeSet::new(),
        held_guard: None,
        told_of_lock: false,
        pacing: Pacing::default(),
        budgets: Budgets::default(),
        config,
    };
    match begin(&mut attached) {
        Ok(()) => Ok(attached),
        Err(e) => {
            attached.give_up();
            Err(e)
        }
    }
}

/// Says which sizes have no effect, because the maps are there already.
pub(crate) fn warn_of_sizes(asked: Sizes, theirs: Sizes) {
    let all = [
        ("--flow-table", asked.slots, theirs.slots, "slots"),
        ("--max-vms", asked.vms, theirs.vms, "VMs"),
        ("--max-rules", asked.rules, theirs.rules, "rules"),
    ];
    for (flag, asked, theirs, what) in all.into_iter().filter(|(_, a, b, _)| a != b) {
        tracing::warn!(
            "{flag} {asked} has no effect: the maps are there already, for {theirs} {what}, and \
             stay as long as a slipgate process or flows are in this network namespace"
        );
    }
}

fn begin(attached: &mut Attached) -> anyhow::Result<()> {
    attached.serve_ports()?;
    // Whether a VM has IPv6 may depend on the routes that its policy names.
    attached.follow_domains()?;
    attached.open_vms()?;
    attached.check_first_egress()?;
    attached.note_taps()?;
    attached.set_rates();
    attached.write_denied()?;
    attached.attach_uplink()?;
    attached.follow_vm_uplinks();
    attached.refresh_next_hops()?;
    let local = attached.network_view().local;
    attached.policies.set_local(&local);
    Ok(())
}

/// Kernel objects that a process creates whichever VMs it serves.
struct Made {
    next_hops: NextHops,
    policies: Catalogue,
}

impl Made {
    fn new(
        datapath: &Datapath,
        owners: &[Owner],
        begin: impl FnOnce(&[u32]) -> anyhow::Result<Catalogue>,
    ) -> anyhow::Result<Self> {
        datapath.remove_defunct()?;
        let rows: Vec<u32> = owners.iter().map(Owner::row).collect();
        let noted = owners.iter();
        let noted = noted.flat_map(|owner| owner.noted_next_hops(datapath.paths()));
        let noted = noted.collect();
        Ok(Self {
            policies: begin(&rows)?,
            next_hops: NextHops::new(rows)?.after(noted),
        })
    }
}
