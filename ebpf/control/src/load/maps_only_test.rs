//! The maps without programs.
use super::*;

impl Datapath {
    /// Makes or joins the maps as [`Datapath::open`] does, and loads no program. Most tests need none:
    /// kernels do not take it well if some thousand programs are freed in a burst.
    pub(crate) fn without_programs(options: &LoadOptions) -> Result<Self> {
        let paths = options.paths.clone();
        probe::ensure_bpffs(&paths.pin_dir)?;
        let _lock = create_and_lock(&paths)?;
        let joined = is_complete(&paths)?;
        paths.keep_cookie()?;
        make_missing_maps(&paths, possible(options.sizes))?;
        let maps = SharedMaps::assemble(open_pins(&paths.pin_dir)?)?;
        initialise(&maps)?;
        Ok(Self {
            paths,
            maps,
            programs: Vec::new(),
            twins: Twins::default(),
            log: None,
            joined,
            serves: AtomicBool::new(false),
        })
    }
}
