//! Many commands at once: one daemon at the most, and record and reality agree.

use std::process::{Child, Output};

use crate::killed::{Dice, Figures};
use crate::support::N0;
use crate::world::World;
use crate::{Driver, Needs, Row, rounds};

pub(crate) const ROWS: &[Row] = &[
    (
        "fifty_starts_at_once_give_one_daemon",
        Needs::Nothing,
        fifty_starts,
    ),
    ("start_stop_status_and_env_at_once", Needs::Nothing, mixed),
    ("some_of_them_are_killed", Needs::Nothing, mixed_and_killed),
];

fn spawn(world: &World, args: &[&str]) -> Child {
    world.machine.run(args).spawn()
}

fn sentence(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let line = stderr.lines().find(|line| line.starts_with("error: "));
    line.unwrap_or_default().to_owned()
}

fn fifty_starts(driver: &Driver) -> String {
    let world = World::new(driver);
    let races = rounds(2);
    for _ in 0..races {
        world.wipe();
        let children: Vec<Child> = (0..50).map(|_| spawn(&world, &["start"])).collect();
        let outputs = children
            .into_iter()
            .map(|child| child.wait_with_output().unwrap());
        let (winners, losers): (Vec<_>, Vec<_>) =
            outputs.partition(|output| output.status.success());
        assert_eq!(winners.len(), 1, "{winners:?}");
        let record: serde_json::Value = serde_json::from_slice(&winners[0].stdout).unwrap();
        let refusal = format!(
            "error: daemon {N0} is already live with pid {}",
            record["pid"]
        );
        for loser in &losers {
            assert_eq!(loser.status.code(), Some(1), "{loser:?}");
            assert_eq!(loser.stdout, b"", "{loser:?}");
            assert_eq!(sentence(loser), refusal);
        }
        let found = world.check(None);
        assert_eq!(found.word(), "recorded");
        assert_eq!(found.record, Some(record));
        world.status_tells(&found);
        world.stop_ends_it();
    }
    format!(
        "{races} races of 50 starts; each with 1 success, 49 refusals that name its pid, and 1 daemon"
    )
}

/// Whether a command of the mixture may end so.
#[track_caller]
fn is_fair(args: &[&str], output: &Output) {
    let said = sentence(output);
    let refusals: &[&str] = match args[0] {
        "start" => &["is already live with pid"],
        "stop" => &["no daemon named", "was not running"],
        // It may be caught while it leaves.
        "env" => &["no daemon named", "is stale", "socket is not reachable"],
        _ => &[],
    };
    let stdout = String::from_utf8_lossy(&output.stdout);
    match output.status.code() {
        Some(0) => assert_eq!(said, "", "{args:?} {output:?}"),
        Some(1) => assert!(
            refusals.iter().any(|refusal| said.contains(refusal)),
            "{args:?} {output:?}"
        ),
        _ => panic!("{args:?} {output:?}"),
    }
    if args[0] == "env" {
        let fails = stdout == "false\n";
        assert_eq!(fails, !output.status.success(), "{output:?}");
        assert!(fails || stdout.lines().count() == 3, "{output:?}");
    }
}

const MIXTURE: [&[&str]; 4] = [
    &["start"],
    &["stop", "--name", N0],
    &["status"],
    &["env", "--name", N0],
];

fn mixed(driver: &Driver) -> String {
    let world = World::new(driver);
    let (mut dice, seed) = Dice::new();
    let mut figures = Figures::default();
    for round in 0..rounds(8) {
        figures.case(&world, &format!("round {round}"), |figures| {
            world.wipe();
            if round % 2 == 1 {
                world.machine.start(&[]);
            }
            // Six of each, in an order that changes.
            let mut commands: Vec<&[&str]> = (0..24).map(|number| MIXTURE[number % 4]).collect();
            for last in (1..commands.len()).rev() {
                commands.swap(last, dice.below(last as u64 + 1) as usize);
            }
            let children: Vec<Child> = commands.iter().map(|args| spawn(&world, args)).collect();
            for (child, args) in children.into_iter().zip(commands) {
                is_fair(args, &child.wait_with_output().unwrap());
            }
            let found = world.check(None);
            assert!(matches!(found.word(), "recorded" | "nothing"), "{found:?}");
            assert!(found.intent.is_none(), "{found:?}");
            world.status_tells(&found);
            world.start_brings_one_up(&found);
            world.stop_ends_it();
            figures.count(found.word());
        });
    }
    figures.report(&format!("rounds of 24 commands at once (seed {seed})"))
}

fn mixed_and_killed(driver: &Driver) -> String {
    let world = World::new(driver);
    let (mut dice, seed) = Dice::new();
    let mut figures = Figures::default();
    for round in 0..rounds(8) {
        figures.case(&world, &format!("round {round}"), |figures| {
            world.wipe();
            let mut children: Vec<Child> = (0..8)
                .map(|number| spawn(&world, MIXTURE[number % 2]))
                .collect();
            for child in &mut children {
                let pause = std::time::Duration::from_micros(dice.below(8000));
                std::thread::sleep(pause);
                child.kill().unwrap();
            }
            for mut child in children {
                child.wait().unwrap();
            }
            let found = world.check(None);
            figures.count(found.word());
            world.status_tells(&found);
            figures.refusals += world.start_brings_one_up(&found);
            world.stop_ends_it();
        });
    }
    figures.report(&format!("rounds of 8 commands, all killed (seed {seed})"))
}
