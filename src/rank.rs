//! Which of a node's ranks we are, as launchers tell their processes, and which of several daemons that rank uses. Pure.

use std::fmt;

/// The launchers that we know: the variable with the rank on this node, the one with the number of ranks on it, and
/// who sets them.
const LAUNCHERS: [Launcher; 5] = [
    Launcher {
        rank: "LOCAL_RANK",
        size: Some("LOCAL_WORLD_SIZE"),
    },
    // How many tasks a Slurm step has on this node stands in a list of all its nodes; see `slurm_tasks`.
    Launcher {
        rank: SLURM_RANK,
        size: None,
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        size: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
    },
    Launcher {
        rank: "MPI_LOCALRANKID",
        size: Some("MPI_LOCALNRANKS"),
    },
    Launcher {
        rank: "PMI_LOCAL_RANK",
        size: Some("PMI_LOCAL_SIZE"),
    },
];

const SLURM_RANK: &str = "SLURM_LOCALID";

struct Launcher {
    rank: &'static str,
    size: Option<&'static str>,
}

/// A rank on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalRank {
    /// The variable that says so.
    pub variable: &'static str,
    /// 0 for the node's first rank.
    pub rank: usize,
    /// How many ranks the node has, where the launcher says it.
    pub size: Option<usize>,
}

impl fmt::Display for LocalRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.variable, self.rank)
    }
}

/// Why there is no daemon for a rank.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankError {
    /// No launcher has set a variable.
    #[error("no launcher has told this process its rank on the node")]
    Missing,
    /// A variable holds something else.
    #[error("{variable}={value:?} is not a rank")]
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// What it holds.
        value: String,
    },
    /// Two launchers disagree.
    #[error("two launchers disagree about the rank on the node: {}", list(found))]
    Ambiguous {
        /// What they say.
        found: Vec<LocalRank>,
    },
    /// The ranks cannot be spread over the daemons evenly.
    #[error("{} has no daemon: {daemons} are live", describe(rank))]
    NoDaemon {
        /// The rank.
        rank: LocalRank,
        /// How many daemons there are.
        daemons: usize,
    },
}

fn describe(rank: &LocalRank) -> String {
    match rank.size {
        Some(size) => format!("rank {rank} of {size} on this node"),
        None => format!("rank {rank}"),
    }
}

fn list(found: &[LocalRank]) -> String {
    let found: Vec<String> = found.iter().map(ToString::to_string).collect();
    found.join(", ")
}

impl RankError {
    /// A short name that stays the same for good.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Missing => "no-rank",
            Self::NotANumber { .. } => "bad-rank",
            Self::Ambiguous { .. } => "ambiguous-rank",
            Self::NoDaemon { .. } => "rank-without-daemon",
        }
    }

    /// What to type or to do next.
    pub fn hint(&self) -> String {
        match self {
            Self::Missing => {
                let variables: Vec<&str> = LAUNCHERS.iter().map(|one| one.rank).collect();
                format!(
                    "start it with torchrun, srun or mpirun, which set one of {}; or use --name",
                    variables.join(", ")
                )
            }
            Self::NotANumber { variable, .. } => format!("unset {variable}"),
            Self::Ambiguous { found } => match found.first() {
                Some(first) => format!("unset {}, if it is the wrong one", first.variable),
                None => "use --name".to_owned(),
            },
            Self::NoDaemon { .. } => {
                "start as many daemons as there are ranks, or as many as divide them evenly; uni-cumps status lists them"
                    .to_owned()
            }
        }
    }
}

/// The rank on this node by the environment that `get` reads.
///
/// Under two launchers, such as torchrun in a Slurm step, the one that has started a single process here says nothing
/// about ranks. Where two remain and disagree, it is an error.
pub fn local(get: impl Fn(&str) -> Option<String>) -> Result<LocalRank, RankError> {
    let mut found = Vec::new();
    for launcher in LAUNCHERS {
        let Some(value) = get(launcher.rank) else {
            continue;
        };
        let rank = value.parse().map_err(|_| RankError::NotANumber {
            variable: launcher.rank,
            value,
        })?;
        let size = match launcher.size {
            Some(size) => get(size).and_then(|size| size.parse().ok()),
            None => slurm_tasks(&get),
        };
        found.push(LocalRank {
            variable: launcher.rank,
            rank,
            size,
        });
    }
    if found.iter().any(|one| one.rank != found[0].rank) {
        found.retain(|one| one.size != Some(1));
    }
    match found.as_slice() {
        [] => Err(RankError::Missing),
        [first, rest @ ..] if rest.iter().all(|one| one.rank == first.rank) => {
            // The one that knows more.
            Ok(*found.iter().find(|one| one.size.is_some()).unwrap_or(first))
        }
        _ => Err(RankError::Ambiguous { found }),
    }
}

/// How many tasks this node has of the Slurm step that we are in. The list has a number for each node, `2(x3)` standing
/// for three nodes with two tasks each. The batch script is not a step, and one process.
fn slurm_tasks(get: impl Fn(&str) -> Option<String>) -> Option<usize> {
    let Some(list) = get("SLURM_STEP_TASKS_PER_NODE") else {
        let in_batch_script = get("SLURM_JOB_ID").is_some() && get("SLURM_STEP_ID").is_none();
        return in_batch_script.then_some(1);
    };
    let mut node: usize = get("SLURM_NODEID")?.parse().ok()?;
    for entry in list.split(',') {
        let (tasks, nodes) = match entry
            .strip_suffix(')')
            .and_then(|entry| entry.split_once("(x"))
        {
            Some((tasks, nodes)) => (tasks, nodes.parse().ok()?),
            None => (entry, 1),
        };
        if node < nodes {
            return tasks.parse().ok();
        }
        node -= nodes;
    }
    None
}

/// Which of `daemons` daemons a rank uses. Up to as many ranks as daemons go one to one; a multiple of them goes round in
/// turn. Other numbers of ranks would load one GPU more than another without a word, and are refused for every rank
/// alike, where the launcher tells the number.
pub fn share(rank: LocalRank, daemons: usize) -> Result<usize, RankError> {
    let fits = match rank.size {
        Some(size) => size <= daemons || (daemons > 0 && size % daemons == 0),
        None => rank.rank < daemons || daemons == 1,
    };
    if daemons == 0 || !fits {
        return Err(RankError::NoDaemon { rank, daemons });
    }
    Ok(rank.rank % daemons)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank_in(environment: &[(&str, &str)]) -> Result<LocalRank, RankError> {
        local(|key| {
            let found = environment.iter().find(|(name, _)| *name == key);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    fn number_in(environment: &[(&str, &str)]) -> Option<(usize, Option<usize>)> {
        rank_in(environment)
            .ok()
            .map(|found| (found.rank, found.size))
    }

    #[test]
    fn every_launcher_is_understood() {
        let torchrun = [("LOCAL_RANK", "3"), ("LOCAL_WORLD_SIZE", "8")];
        assert_eq!(number_in(&torchrun), Some((3, Some(8))));
        let open_mpi = [
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        assert_eq!(number_in(&open_mpi), Some((1, Some(2))));
        let intel_mpi = [("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "4")];
        assert_eq!(number_in(&intel_mpi), Some((0, Some(4))));
        let pals = [("PMI_LOCAL_RANK", "2")];
        assert_eq!(number_in(&pals), Some((2, None)));
        for (tasks, node, size) in [
            ("4", "0", Some(4)),
            ("2(x3),1", "2", Some(2)),
            ("2(x3),1", "3", Some(1)),
            ("2(x3),1", "4", None),
            ("2(x", "0", None),
        ] {
            let slurm = [
                ("SLURM_LOCALID", "0"),
                ("SLURM_STEP_TASKS_PER_NODE", tasks),
                ("SLURM_NODEID", node),
            ];
            assert_eq!(number_in(&slurm), Some((0, size)), "{tasks} {node}");
        }
    }

    #[test]
    fn a_missing_rank_and_a_rank_that_is_none_are_errors() {
        assert_eq!(rank_in(&[("RANK", "1")]), Err(RankError::Missing));
        for value in ["", "-1", "one", "1 ", "0x1"] {
            let error = rank_in(&[("LOCAL_RANK", value)]).unwrap_err();
            assert_eq!(error.code(), "bad-rank", "{value:?}");
        }
    }

    #[test]
    fn launchers_that_disagree_are_an_error_unless_one_started_a_single_process() {
        let both = [("LOCAL_RANK", "0"), ("SLURM_LOCALID", "1")];
        assert_eq!(rank_in(&both).unwrap_err().code(), "ambiguous-rank");
        assert_eq!(
            number_in(&[("LOCAL_RANK", "1"), ("SLURM_LOCALID", "1")]),
            Some((1, None))
        );
        let torchrun_in_a_step = [
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),
            ("SLURM_NODEID", "1"),
            ("LOCAL_RANK", "5"),
            ("LOCAL_WORLD_SIZE", "8"),
        ];
        assert_eq!(number_in(&torchrun_in_a_step), Some((5, Some(8))));
        let mpirun_in_a_batch_script = [
            ("SLURM_LOCALID", "0"),
            ("SLURM_JOB_ID", "17"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ];
        assert_eq!(number_in(&mpirun_in_a_batch_script), Some((1, Some(2))));
    }

    #[test]
    fn ranks_are_spread_evenly_or_not_at_all() {
        let share_of = |rank, size, daemons| {
            let rank = LocalRank {
                variable: "LOCAL_RANK",
                rank,
                size,
            };
            share(rank, daemons).ok()
        };
        assert_eq!(share_of(1, Some(2), 2), Some(1));
        assert_eq!(share_of(1, Some(2), 4), Some(1));
        assert_eq!(share_of(5, Some(8), 4), Some(1));
        assert_eq!(share_of(0, Some(3), 2), None, "every rank is told");
        assert_eq!(share_of(1, None, 2), Some(1));
        assert_eq!(share_of(2, None, 2), None);
        assert_eq!(share_of(7, None, 1), Some(0));
        assert_eq!(share_of(0, None, 0), None);
    }
}
